"""Sharded data parallelism: ZeRO 1, 2 and 3 (Paddle's sharding pass), from a one-device step.

A *rank* is one trainer. It stores a slice of each large parameter, or of its optimizer state. The
modules rewrite a step of one device into the program that every rank runs.

transform          `sharding`: plans the sharded training of a step
plan               the plan: the program that all ranks run, and the state that each rank stores
options            the options, which check their values
choose_slices      chooses the parameters to slice, each along one dimension
forward_values     values of the forward pass that the update reads
update             the update, rewritten for slices
reduce_scatter     reduction of gradients into slices
rank_values        analysis of values that differ from rank to rank
scattered_values       analysis of gradients that loops can scatter layer by layer
slice_analysis     analysis of values that can be computed as slices
slice_writer       writer of equations on slices
live_ranges        chooses the equations during which a parameter stays gathered
all_gather         stage 3: gathers each parameter before the equations that read it, also in loops
layer_residuals    rewrites loops so that they recompute residuals instead of storing them
prefetch           rewrites loops so that they gather a layer while they compute the previous one
rank_layout        decides what a rank stores as slices, and how gradients are reduced
rank_update        writes a rank's update, and the gathers after the update
rank_program       writes a rank's program
gradient_results   results that the step computes from gradients: a norm, a count
mixed_precision    matrix products in 16 bits, and loss scaling
by_leaf            the alternative to slices: each rank stores and updates complete parameters
"""
