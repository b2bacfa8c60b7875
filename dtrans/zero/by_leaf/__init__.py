"""Ranks that own whole leaves, for optimizers that mix rows (Paddle's `partition_algor`).

assign    the owner of each leaf
layout    gradients and state in bins, and the reduction of gradients
packing   bins: the arrays of one owner as one vector
update    the update, with one branch per rank
"""
