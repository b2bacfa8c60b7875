"""Code that all runners use.

segments        a program, cut into compiled pieces and communication
spmd            one trainer's program mapped over all trainers: on a mesh, or on one device
lowering        converts a program to the function that one trainer on a named axis runs
merge           rules that merge the results of all trainers
batch           batches that are divided among trainers: checks and padding
state           checks of the state that is passed to a step
nonfinite       infinities and NaNs in gradients, found on the trainer that computed them
lowered         compiled functions of a step, recorded and compiled once
platforms       differences between platforms
feeder          loads the next batches in a thread, while a step runs
metrics         metrics of training, written to TensorBoard, a CSV file or a function
summary_writer  summaries as TensorBoard events
"""
