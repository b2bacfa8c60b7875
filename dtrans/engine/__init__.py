"""Rewrite of a program with sharded inputs into the program of one shard.

Batches are sharded over trainers, columns of parameters over devices.

split             `split`: a program and its sharded dimensions to the program of one shard
layout            layouts of a value: replicated, sharded, or a partial sum
rules             strategies of an equation on shards
values            values of a shard, converted to the layout that an equation reads
counted_values    pieces of values that are computed from counters and fills
writer            writer of the program, and of bodies of equations
strategy_writers  writers of the strategies
open_sums         partial sums that stay open through linear equations
row_moves         concatenations, slices and padding along the sharded dimension
sharded_scans     scans along it
custom_rules      calls with derivative rules of users
loops             bodies of loops and branches
merged_reductions  independent all-reduces merged into one
array_fns         small functions of arrays that the program calls
"""
