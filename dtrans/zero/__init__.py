"""Sharding: ZeRO 1, 2 and 3 (Paddle's sharding pass), as rewrites of the same step.

transform          `sharding`: a step to a plan
plan               the plan: one program for all ranks, and their state and traffic
options            its options and their checks
choose_slices      leaves that are cut, their dimensions, and why others are not cut
forward_values     values of forward that the update takes as inputs
update             the update, on slices
reduce_scatter     reduction of gradients that ranks store as slices
rank_values        values that differ from rank to rank
scatter_flow       the point at which gradients of layers become slices
slice_writer       equations on slices, as the engine writes them
live_ranges        the uses of parameters
all_gather         their gather, in loops too (stage 3)
layer_residuals    values of layers that loops compute again
prefetch           the next layer gathered ahead of time
rank_program       the program of a rank
gradient_results   results that are computed from gradients in slices
mixed_precision    products in 16 bits, and loss scaling
by_leaf            whole leaves given to ranks, in the place of slices
"""
