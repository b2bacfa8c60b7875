"""Row analysis: find the parameters with updates that can be sliced by rows, and slice the updates.

Parameter servers split a large parameter by rows (indices of dimension 0). A *block* is the range
of rows that one server stores. The optimizer, however, is written for full arrays. This package
finds the parts of the optimizer's program that treat rows independently. It then rewrites them, so
that each server updates its block without the other rows. A *leaf* is one array of the parameter
pytree.

    layout       relation of a value to the rows of parameters
    rules        rule of each primitive: the operand rows from which output rows are computed
    flow         finds the layout of each value of an optimizer
    normalize    splits branches and loops over several leaves: one for each leaf
    analysis     finds the parameters that can be split by rows
    slices       a slice of an array along one axis
    parts        a slice of an equation's output, computed from slices of its operands
    random_bits  random bits of some rows
    writer       equations rewritten for a block of rows
    row_buckets  rows assigned to buckets by their ids
"""
