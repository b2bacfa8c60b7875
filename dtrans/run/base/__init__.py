"""Parts that all ways of running share.

segments   a program, cut at the equations that its fabric must carry out
batch      how trainers share a batch
spmd       the program of one trainer, run for all of them: on a mesh, or on one device
merge      results of several trainers become one
lowering   a program as a function of one trainer on a named axis
platforms  what one platform alone needs
"""
