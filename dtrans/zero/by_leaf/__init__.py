"""Ranks that own whole leaves, for optimizers that mix rows (Paddle's `partition_algor`).

assign    who owns which leaf
layout    what each owner holds, and how gradients reach it
packing   leaves side by side in one vector for each owner
update    the update of what a rank owns
"""
