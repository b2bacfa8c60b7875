"""Sharded data parallelism: ZeRO 1, 2 and 3 (Paddle's sharding pass) as rewrites of one step.

transform          `sharding`: plans a step
plan               the plan: the program that all ranks run, and the state that each rank stores
options            options and their checks
choose_slices      choice of the leaves to cut, each along one dimension
forward_values     values that the update reads from the forward pass
update             the update, rewritten for slices
reduce_scatter     reduction of gradients into slices
rank_values        analysis of values that differ from rank to rank
scatter_flow       analysis of gradients that loops can scatter layer by layer
slice_analysis     analysis of values that can be computed as slices
slice_writer       writer of equations on slices
live_ranges        windows of equations in which a parameter stays gathered
all_gather         writer that gathers parameters where they are read, in loops too (stage 3)
layer_residuals    rewrite of loops that recomputes residuals instead of storing them
prefetch           rewrite of loops that gathers the next layer ahead
rank_layout        decisions about a rank: its slices, its update, its reductions
rank_update        writer of a rank's update, and of the gathers after it
rank_program       writer of a rank's program
gradient_results   results that the step computes from gradients: a norm, a count
mixed_precision    matrix products in 16 bits, and loss scaling
by_leaf            the alternative to slices: each rank owns whole leaves
"""
