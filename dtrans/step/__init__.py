"""One training step, before anybody distributes it: traced, marked, cut.

trace              a function to a program, with names and roles
marks              gradients, marked by identities: `value_and_grad`, `make_train_step`
capture            the loss function as one equation, before it is differentiated
gradients          which values are the gradients
cut                the two halves of a step: forward and backward, and the update
handed_values      values of forward that the update reads, made inputs of it
batch_numbers      numbers of the size of the batch in an update, made inputs of it
startup            which output of init is the first value of which input of the step
batch_sharing      how a batch is shared: the record of options
observers          host callbacks: what each reads, who calls it, and refusals
forward_backward   the first half, written with something to do at each gradient
weight_gradients   products that make gradients of weights the way round in which weights are kept
scopes             what a user marks inside a model: stages, and layers that are split
collect            values of the model that are merged in a way of the user's
summary            values of the model that are shown
"""
