"""Programs: jaxprs with names for inputs and outputs, and roles for equations; and passes on them.

A role states the purpose of an equation, such as `forward`, `optimize` or `rpc`.

pytree      pytrees of named arrays and static leaves
program     `Program`: a named, closed jaxpr
op_list     list of a program's equations, with a name for each value
display     programs and plans as text and HTML
inline      inlining of calls, and dead code elimination
builder     `Builder`: writes new jaxprs from equations of old ones
dataflow    backward slices, and propagation from inputs to outputs
selection   several entries of a mapping or sequence, and inverse mappings
interpret   forward and backward analyses, which enter loops, branches and calls
folding     constant folding, and values that equal an input
cost        flops and bytes of an equation
fingerprint  digests of programs and options
batched_gathers  gathers by row indices, rewritten as batched gathers
row_numbers  proofs that an integer array counts a dimension, as `arange` does
array_fns   small array functions, which `Builder.call` traces
"""
