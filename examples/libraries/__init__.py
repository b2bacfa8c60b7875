"""Training steps in the style of the documentation of flax, nnx and Equinox.

Each file has a model and a step for one device, without dtrans. `run` distributes the step.

    dtrans example                                 lists the examples
    dtrans example flax_cnn --mode sharding        trains an example, and compares with one device

    data        batches of the digits, and of characters
    run         the plan of an example, and its training

A file defines three functions. `init(key)` returns the state, or a pair (model, optimizer state).
`batch(step)` returns a batch. `training(value_and_grad)` returns the step. Its argument is
`dtrans.value_and_grad` for a pipeline, else the library's function. The examples need the extra
`libraries`: flax, equinox and scikit-learn.
"""

EXAMPLES = {
    "flax_cnn": "a convolutional net and a TrainState, on handwritten digits",
    "nnx_mlp": "a perceptron of nnx with batch norm, dropout and metrics, on handwritten digits",
    "equinox_mlp": "a perceptron of Equinox and its optimizer's state, on handwritten digits",
    "equinox_transformer": "a transformer of Equinox with dropout, on characters of Python's "
    "standard library",
    "nanogpt": "a GPT in flax.linen with clipping, a schedule, and weight decay of matrices only, "
    "on characters",
    "gan": "a generator and a discriminator of handwritten digits, with two losses and TrainStates",
    "lora": "low-rank adapters of an Equinox model with frozen weights, on handwritten digits",
}
