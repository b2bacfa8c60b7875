"""Data parallelism over collectives: Paddle's nccl2 mode.

transform      `nccl2`: plans a step
plan           the plan: one program for all trainers
options        options and their checks
merge_rules    rules that merge the results of trainers
reducer        buckets of gradients, and their reduction
replica        inputs of a trainer; results that the step computes from reduced gradients
accumulation   micro-steps of a trainer
startup        startup program of a trainer that is a process
state          state of a job between steps
"""
