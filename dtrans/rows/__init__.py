"""Row analysis: the relation between values of an update and the rows of parameters.

The package also writes an update for some of the rows.

layout       layouts: shared, rows of a leaf, or colocated with leaves
rules        effect of each primitive on rows
flow         one forward pass over equations, loops and branches
normalize    equations on several leaves, split into one for each
analysis     leaves that an optimizer allows to slice
slices       a slice of an array
parts        a slice of an output, from slices of operands
random_bits  random bits of some rows
writer       equations rewritten for a block of rows
row_buckets  rows assigned to buckets by their ids
"""
