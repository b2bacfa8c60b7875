"""Row analysis: the leaves whose updates can be sliced by rows, and the update of a block.

A *block* is a part of a leaf's rows (indices of dimension 0) that one server has. The analysis
relates every value of the update to the rows of parameters. The writer then writes the update of a
block.

    layout       layouts: shared, rows of a leaf, or colocated with leaves
    rules        rule of each primitive: the operand rows from which output rows are computed
    flow         one forward pass over equations, loops and branches
    normalize    rewrite of branches and loops over several leaves: one for each leaf
    analysis     the leaves that an optimizer allows to slice
    slices       a slice of an array along one axis
    parts        a slice of an equation's output, computed from slices of its operands
    random_bits  random bits of some rows
    writer       equations rewritten for a block of rows
    row_buckets  rows assigned to buckets by their ids
"""
