"""Parts that all realisers share.

segments        a program, cut into compiled pieces and communication
spmd            one trainer's program mapped over all trainers: on a mesh, or on one device
lowering        a program as a function, for one trainer on a named axis
merge           rules that merge the results of all trainers
batch           batches that trainers share: checks, shares and padding
state           checks of the state that is passed to a step
nonfinite       infinities and NaNs in gradients, found on the trainer that computed them
lowered         compiled functions of a step, recorded and compiled once
platforms       differences between platforms
feeder          batches that are loaded ahead of the steps
metrics         metrics of training, written to TensorBoard, a CSV file or a function
summary_writer  summaries as TensorBoard events
"""
