"""Jobs whose reductions XLA carries out: nccl2 mode and sharding.

job            a running plan, on any backend
trainers       the interface of backends, and the layout of a step
batches        batches, as trainers share them
state_arrays   the arrays of the state, and their slices
first_state    the compiled startup program
mesh           trainers on devices of this process
simulate       trainers on one device
cluster        trainers in processes
"""
