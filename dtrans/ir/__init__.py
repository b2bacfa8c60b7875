"""What a program is: a jaxpr whose inputs, outputs and equations have names and roles.

pytree      pytrees taken apart into arrays with paths, and everything else held still
program     `Program`: a named, closed jaxpr
display     programs and plans as text and HTML
inline      calls replaced by their bodies, and dead code removed
builder     `Builder`: writes new jaxprs out of equations of old ones
dataflow    what a value is made of, and what it reaches
interpret   drivers of dataflow analyses: forward and backward, into loops, branches and calls
folding     values that are one number everywhere, or an input as it was
cost        flops and bytes of an equation
array_fns   small functions of arrays that equations are written with
"""
