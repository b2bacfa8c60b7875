"""Sharding: ZeRO 1, 2 and 3 (Paddle's sharding pass), as rewrites of the same step.

transform          `sharding`: a step to a plan
plan               the plan: one program for all ranks, what each holds, and what it moves
options            what may be asked of it, and its checks
choose_slices      which leaves are cut, along which dimension, and why others are not
forward_values     values of forward that the update takes as inputs
update             the update, on slices
reduce_scatter     how ranks reduce gradients of which each keeps a slice
rank_values        values that differ from rank to rank
scatter_flow       where gradients of layers become slices
slice_writer       equations on slices, as the engine writes them
live_ranges        where parameters are read
all_gather         how they are gathered there, in loops too (stage 3)
layer_residuals    values of layers that loops compute again
prefetch           the next layer gathered ahead of time
rank_program       the program of a rank
gradient_results   results that are computed from gradients in slices
mixed_precision    products in 16 bits, and loss scaling
by_leaf            whole leaves given to ranks, in the place of slices
"""
