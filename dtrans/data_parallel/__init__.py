"""Data parallelism over collectives: trainers average their gradients (Paddle's nccl2 mode).

transform      `nccl2`: plans a step
plan           the plan: one program for all trainers
options        the options, which check their values
merge_rules    rules that merge the results of trainers
reducer        buckets of gradients, and their reduction
replica        inputs of a trainer; results that depend on reduced gradients
device_parts   rewrites a trainer's program for one of several devices of the trainer
colocated      plans in which trainers also divide parameters of `dtrans.split` layers
sequence_axis  devices of a trainer that divide sequences
accumulation   micro-steps: a trainer processes its part of the batch piece by piece
startup        startup program of a trainer process
state          state of a job between steps
"""
