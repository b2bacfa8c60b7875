"""Division of a batch among trainers, so that a job computes the same numbers as one device.

trainer_step    the step of one trainer, on its part of the batch
scaled          proof that one device's outputs are the mean, or the sum, of outputs on parts
exact_step      the step of one trainer, and the merge of gradients and results
precomputed     values of the full batch, which a job computes before it runs the parts
written_parts   steps on parts, written so that the parts need no communication
precomputed_micro_steps  micro-batches of pipelines, and micro-steps (gradient accumulation), as
                parts that need no communication
"""
