"""Analysis of a training step that a user wrote for one device: trace, gradients and two halves.

All strategies (parameter servers, ZeRO, pipelines) start here. They trace the step, and find its
gradients. At the gradients they divide the step into a trainer half (forward and backward pass) and
an optimize half (the update).

trace              tracing of a function to a program of equations with names and roles
marks              `value_and_grad` and `make_train_step`, which mark gradients in a trace
local_clip         clips each trainer's gradients by their norm, before trainers send them
capture            trace that keeps the loss function as one equation, not yet differentiated
gradients          search for the values of a trace that are gradients
halves             division of a step into two halves: forward with backward, and the update
handed_values      makes values of the forward pass, such as the loss, inputs of the update
batch_numbers      makes numbers that depend on the batch size inputs of the update
startup            matches the outputs of `init` with the step's state arguments
one_state          splits one state (a TrainState) into parameters and optimizer state
applied            runs functions of a job's state; fetches only the leaves that they read
frozen             removes updates that never change their parameter
hyperparameters    finds and replaces hyperparameters in the optimizer's state
batch_sharing      the option `batch`, and the part of a batch that each process reads
observers          host callbacks: the values they read, and the trainer that calls them
forward_backward   writes the equations of the trainer half
weight_gradients   removes the transposes that follow products in weight gradients
scopes             `with` statements by which a user marks stages, split layers, local reductions
collect            marks outputs that a pipeline merges over micro-batches and replicas
summary            values that a user records for TensorBoard
"""
