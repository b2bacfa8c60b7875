"""Examples: small scripts, each with a model, data and a job.

    dtrans example                              lists the examples
    dtrans example digits --mode nccl2          runs an example
    dtrans example digits --help                lists the options of an example

    __main__            the command line: a command for each script
    train_digits, train_characters, train_words, train_clicks
                        scripts, which parse options and call a job
    train_library       a script for each step in libraries/
    options             options that several scripts have

    digits              the images, a perceptron, and batches
    optimizer_choice    optax optimizers by name, with learning rates for the digits
    digits_training     settings of the digits job, and the result of a trainer
    digits_role         one process of the digits job, with Paddle's calls; `dtrans launch` runs it
    digits_job          the digits job, compared with one device
    characters          the source of Python's standard library, and a transformer
    character_job       a pipeline that trains this transformer, compared with one device
    word2vec, word_job      word vectors in tables on parameter servers: the model, and the job
    clicks, click_job       clicks drawn from known probabilities: the data and model, and the job
    table_job           functions of the two jobs with tables
    settings            conversion of settings to arguments of a command, and back
    compare             devices for a job, and the difference between its result and one device's
    report              tables, progress bars and plots
    libraries/          steps of flax, nnx and Equinox: a model and a step in each file

The scripts need the extra `examples` (scikit-learn for data, matplotlib for plots). The scripts of
libraries/ need the extra `libraries`. Only the repository contains the examples, not the wheel.
"""

import os
from pathlib import Path


ROOT = Path(__file__).parents[1]


def role_path() -> str:
    """Return a PYTHONPATH that lets processes import `examples` from any folder."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
