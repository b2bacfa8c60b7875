"""Sharding in which each parameter belongs to one rank, its owner (Paddle's `partition_algor`).

Use this sharding for optimizers that mix the rows of a parameter, such as Muon. If parameters were
sliced instead, every rank would gather the full parameter.

assign    chooses the owner of each parameter
layout    packs gradients and state into one vector per owner, and reduces gradients
packing   bins: vectors that pack the arrays of one owner
update    writes the update, with one branch per rank
"""
