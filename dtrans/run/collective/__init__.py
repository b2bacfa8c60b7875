"""Jobs whose collectives XLA carries out: nccl2 mode and sharding.

job            a running plan, on any backend
trainers       the interface of backends; the layout of a step over trainers
batches        batches, split over the trainers
state_arrays   the arrays of the state, and their slices
first_state    the compiled startup program
mesh           backend: trainers on devices of this process
simulate       backend: trainers simulated on one device
cluster        backend: trainers in several processes
"""
