"""Jobs without parameter servers: XLA executes the collectives that exchange gradients.

These are the jobs of `dtrans.nccl2` and `dtrans.sharding`. A *backend* decides where the trainers
run: on devices of this process, in several processes, or simulated on one device.

job            a running plan, on any backend
trainers       the interface of backends; how inputs and outputs are laid out over trainers
batches        splits batches over the trainers
state_arrays   the arrays of the state, and their slices
first_state    the compiled startup program
mesh           backend: trainers on devices of this process
simulate       backend: trainers simulated on one device
cluster        backend: trainers in several processes
"""
