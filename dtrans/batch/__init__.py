"""The batch of a step, cut over trainers so that the job gives the numbers of one device.

trainer_step       the step of one trainer, on its part of the batch
scaled             proof that it is the user's own step, traced on the part: a mean, or a sum, of parts
shared             a strategy's share of a step: the step of one trainer, and how gradients and results are merged
given_values       values of the whole batch, computed before parts
written_parts      steps of parts that exchange nothing, as the engine writes them
given_micro_steps  micro-batches and micro-steps that share a step by such parts
"""
