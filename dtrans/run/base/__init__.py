"""What all ways of running share.

segments   a program, cut at the equations that its fabric must carry out
batch      how trainers share a batch
lowering   communication over a named axis, as what JAX has for it
platforms  what one platform alone needs
"""
