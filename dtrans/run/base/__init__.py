"""Code that the runners of all strategies use.

segments        divides a program into compiled pieces, with communication between them
spmd            runs one trainer's program on all trainers: on a mesh, or on one device
lowering        converts a program to a JAX function of one trainer
merge           rules that merge the results of all trainers
batch           batches that are divided among trainers: checks and padding
state           checks of the state that a user passes to a step
nonfinite       checks gradients for infinities and NaNs, on the trainer that computed them
lowered         record of the compiled functions of a step, for `job.lower`
platforms       differences between CPUs and accelerators
feeder          loads the next batches in a thread, while a step runs
batch_source    a user's batches; can go back to an earlier batch after a failure
metrics         metrics of training, written to TensorBoard, a CSV file or a function
summary_writer  summaries as TensorBoard events
"""
