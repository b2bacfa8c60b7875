"""Batch sharding: each trainer takes a part, and the job computes one device's numbers.

trainer_step   the step of one trainer, on its part of the batch
scaled         proof that it equals the user's step, traced on the part: a mean, or a sum, of parts
exact_step     exact sharding of a step: its trainer step, and how gradients and results are merged
precomputed    values of the full batch that are computed before its parts
written_parts  steps of parts without communication, as the engine writes them
precomputed_micro_steps  micro-batches and micro-steps from such parts
"""
