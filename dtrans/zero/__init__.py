"""Sharding: ZeRO 1, 2 and 3 (Paddle's sharding pass), as rewrites of the same step.

transform          `sharding`: from a step to a plan
plan               the plan: one program for all ranks, their state and traffic
options            options and their checks
choose_slices      leaves that are cut, their dimensions, and why others are not cut
forward_values     values of forward that the update takes as inputs
update             the update, on slices
reduce_scatter     reduction of gradients that ranks store as slices
rank_values        values that differ from rank to rank
scatter_flow       the point at which gradients of layers become slices
slice_analysis     values that can be computed as slices
slice_writer       equations on slices
live_ranges        uses of parameters, and the windows in which they are gathered
all_gather         gathers of parameters, in loops too (stage 3)
layer_residuals    residuals of layers that loops recompute
prefetch           loops that gather the next layer ahead
rank_layout        layout of a step on ranks
rank_update        update of a rank, and its gathers
rank_program       program of a rank
gradient_results   results that are computed from sliced gradients
mixed_precision    products in 16 bits, and loss scaling
by_leaf            assignment of whole leaves to ranks, in place of slices
"""
