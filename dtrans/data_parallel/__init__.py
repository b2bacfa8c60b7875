"""Data parallelism over collectives: Paddle's nccl2 mode.

transform      `nccl2`: from a step to a plan
plan           the plan: one program for all trainers
options        options and their checks
merge_rules    merge rules of the trainers' results
reducer        buckets of gradients, and their reduction
replica        inputs of a trainer, and results computed from reduced gradients
accumulation   micro-steps of a trainer
startup        startup of trainers as processes
"""
