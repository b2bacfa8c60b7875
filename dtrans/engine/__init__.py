"""A program whose inputs are cut over shards, as the program of one shard: batches over trainers,
columns over devices.

split       `split`: a program and its cuts to the program of one shard
layout      whole, cut, or a part of a sum
rules       how an equation is carried out on pieces
values      values made into the layout that an equation reads
writer      writes the program
row_moves   concatenations, slices and padding along the dimension that is cut
turns       loops along it
custom_rules  calls with derivative rules of users
loops       bodies of loops and branches, on pieces
merged_reductions  independent all-reduces as one
array_fns   small functions of arrays that it is written with
"""
