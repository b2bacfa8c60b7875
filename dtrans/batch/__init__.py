"""Batch sharding: each trainer gets a part of the batch, and the job computes one device's numbers.

trainer_step   the step of one trainer, on its part of the batch
scaled         proof that the user's step, run on parts, gives one device's step as mean or sum
exact_step     the sharded step, and how gradients and results are merged
precomputed    values of the full batch that are computed before the parts
written_parts  steps of parts that need no communication
precomputed_micro_steps  micro-batches and micro-steps from these parts
"""
