"""One training step of one device: traced, marked and divided into halves.

trace              tracing of a function to a program with names and roles
marks              `value_and_grad`, `make_train_step`: identity equations that mark gradients
local_clip         clips the gradients of one trainer by their norm, before they are reduced or sent
capture            a trace in which the loss function is one undifferentiated equation
gradients          detection of the values that are gradients
halves             division of a step into two halves: forward with backward, and the update
handed_values      values that forward computes for the update become inputs of the update
batch_numbers      numbers that depend on the batch size become inputs of the update
startup            pairing of init's outputs with the step's inputs
one_state          split of one state (a TrainState) into parameters and optimizer state
applied            functions of the state, divided into parts that read some of its leaves
frozen             removal of updates that never change their leaf
hyperparameters    search and replacement of hyperparameters in the optimizer's state
batch_sharing      the option `batch`, and the part of a batch that each process reads
observers          host callbacks: the values they read, and the trainer that calls them
forward_backward   writer of the first half; calls a function for each gradient
weight_gradients   removal of the transposes that follow products in weight gradients
scopes             `with` statements by which a user marks stages, split layers, local reductions
collect            values that a user marks: pipelines merge them over micro-batches and replicas
summary            values that a user records for TensorBoard
"""
