"""What all ways of running share.

segments   a program, cut at the equations that its fabric must carry out
batch      how trainers share a batch
lowering   a program as a function of one trainer on a named axis
platforms  what one platform alone needs
"""
