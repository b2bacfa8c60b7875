"""Rewrite of a program with sharded inputs into the SPMD program of one shard.

A *shard* is one of the trainers or devices that divide a value. A value is *replicated*, *sharded*
(each shard has a *piece*), or a *partial sum* (each shard has a *term*; the value is their sum).
Batches are sharded over trainers, columns of parameters over devices.

    split             `split`: the entry point for tensor parallelism
    layout            layouts of a value: replicated, sharded, or a partial sum
    rules             ways to run an equation on pieces, and the choice of the cheapest
    values            the values of a shard, and their conversion between layouts
    counted_values    pieces of `iota`, masks and random bits, which a shard computes alone
    shard_collectives  collectives that convert a value to another layout
    writer            writer of the program, and of the bodies of its equations
    strategy_writers  functions that write an equation by each strategy of `rules`
    open_sums         equations that run on the terms of a sum, so that it is reduced later
    row_demands       sums that a shard needs only as a piece
    row_moves         concatenations, slices and padding along the sharded dimension
    sharded_scans     scans over the sharded dimension
    custom_rules      `jax.custom_jvp` and `jax.custom_vjp` calls
    loops             bodies of loops and branches
    axis_bytes        collectives in a program, and their bytes over each mesh axis
    merged_reductions  independent all-reduces merged into one
    array_fns         small array functions that the writers call
"""
