"""Data parallelism over collectives: Paddle's nccl2 mode.

transform      `nccl2`: a step to a plan
plan           the plan: one program for all trainers
options        what may be asked of it, and its checks
merge_rules    how results of several trainers are merged
reducer        buckets of gradients, and what is done to them before and after they are reduced
replica        what each trainer begins with
accumulation   several micro-steps with one gradient at their end
startup        how the trainers of a job of processes start
"""
