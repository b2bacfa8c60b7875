"""Programs: jaxprs whose inputs, outputs and equations have names and roles.

pytree      pytrees as arrays with paths, and static leaves
program     `Program`: a named, closed jaxpr
op_list     equations of a program as ops, and names of its values
display     programs and plans as text and HTML
inline      inlining of calls, and dead code elimination
builder     `Builder`: writes new jaxprs from equations of old ones
dataflow    values that an output depends on, and values that depend on an input
interpret   drivers of dataflow analyses: forward and backward, into loops, branches and calls
folding     values that are one number in all entries, or an unchanged input
cost        flops and bytes of an equation
fingerprint  digests of programs and options
batched_gathers  gathers by row indices, rewritten as batched gathers
row_numbers  integers that count a dimension
array_fns   small functions of arrays that transforms write equations with
"""
