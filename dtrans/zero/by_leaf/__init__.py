"""Ranks that own whole leaves, for optimizers that mix rows (Paddle's `partition_algor`).

assign    owners of the leaves
layout    bins of each owner, and the reductions of gradients into them
packing   bins: the arrays of an owner in one vector
update    the update of each owner's leaves
"""
