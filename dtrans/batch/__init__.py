"""The batch of a step, cut over trainers so that the job gives the numbers of one device.

trainer_step   the step of one trainer, on its part of the batch
scaled         whether that is the step itself, traced on the part: a mean, or a sum, of parts
shared         what a strategy is given: a step for one trainer, and how gradients and results become one
"""
