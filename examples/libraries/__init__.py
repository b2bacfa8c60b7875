"""Training steps in the form that the first pages of Flax, nnx and Equinox give them, in every
strategy.

Each file has a model and its step for one device, without dtrans. `run` distributes it.

    dtrans example                                 lists them
    dtrans example flax_cnn --mode sharding        trains one, and compares it with one device

    data        batches of the digits, and of the standard library's source
    run         the strategies, and what is printed

A file has `init(key)`, which makes the state, or the pair of a model and an optimizer's state;
`batch(step)`; and `training(value_and_grad)`, which makes the step. For a pipeline `value_and_grad`
is `dtrans.value_and_grad`, else the library's own. They need the extra `libraries`: flax, equinox
and scikit-learn.
"""

EXAMPLES = {
    "flax_cnn": "a convolutional net and a TrainState, on handwritten digits",
    "nnx_mlp": "a perceptron of nnx with batch norm, dropout and metrics, on handwritten digits",
    "equinox_mlp": "a perceptron of Equinox and its optimizer's state, on handwritten digits",
    "equinox_transformer": "a transformer of Equinox with dropout, on characters of Python's "
    "standard library",
    "nanogpt": "a GPT in flax.linen: clipping, a schedule, and a decay of matrices alone; on "
    "characters",
    "gan": "two TrainStates, each with its loss, that learn against each other to draw digits",
    "lora": "low-rank adapters beside the frozen weights of an Equinox model, on handwritten "
    "digits",
}
