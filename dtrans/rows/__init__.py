"""Row analysis: what each value of an update has to do with the rows of parameters, and how to
write it for some rows.

layout      shared by all, rows of a leaf, or whole
rules       what each primitive does to rows
flow        one pass over equations, loops and branches
normalize   equations taken apart that span several leaves
analysis    which leaves an optimizer lets us slice
slices      a part of an array
parts       a part of what an equation makes, of parts of its operands
random_bits some rows of random bits
writer      equations written for a block of rows
row_buckets rows that are dealt out by their numbers
"""
