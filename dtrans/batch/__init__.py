"""The batch of a step, cut over trainers so that the job gives the numbers of one device.

trainer_step   the step of one trainer, on its part of the batch
scaled         whether that is the step itself, traced on the part: a mean, or a sum, of parts
given_values   values of the whole batch, made before parts
written_parts  parts whose loss the engine writes, before it is differentiated
shared         what a strategy is given: a step for one trainer, and how gradients and results become one
"""
