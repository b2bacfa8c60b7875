"""One training step of one device: traced, marked and cut into halves.

trace              a function to a program with names and roles
marks              gradients, marked by identities: `value_and_grad`, `make_train_step`
capture            the loss function as one equation, before it is differentiated
gradients          the values that are gradients
cut                the two halves of a step: forward and backward, and the update
handed_values      values of forward that the update reads, as inputs of the update
batch_numbers      numbers in an update that depend on the batch size, as inputs of the update
startup            pairing of init's outputs with the step's inputs
one_state          steps of one state (a TrainState), split into parameters and optimizer state
frozen             leaves whose update never changes them
hyperparameters    hyperparameters in the optimizer's state: search and replacement
batch_sharing      options for the batch, and the parts of processes
observers          host callbacks: their operands, and the trainers that call them
forward_backward   the first half, written with a callback for each gradient
weight_gradients   transposes of weight gradients, fused into their products
scopes             scopes of users in a model: stages, split layers, local reductions
collect            values of the model that a user merges by a rule
summary            values of the model for TensorBoard
"""
