"""Examples: small scripts, each with its model, its data and its job.

    dtrans example                              lists them
    dtrans example digits --mode nccl2          runs one
    dtrans example digits --help                lists its options

    __main__            the command line: a command for each script
    train_digits, train_characters, train_words, train_clicks    scripts: options, a call of a job
    train_library       scripts of the steps in libraries/
    options             options that several scripts have

    digits              data, model, batches: all that a training script needs to know
    optimizer_choice    optax optimizers by name, each with a learning rate that suits the digits
    digits_training     the settings that all roles agree on, and what a trainer hands back
    digits_role         one process of the job, in Paddle's words; run by `dtrans launch`
    digits_job          the whole job, on either engine, compared with one device
    characters          the source of Python's standard library, and a transformer that reads it
    character_job       the job in stages, compared with one device
    word2vec, word_job      word vectors in tables on parameter servers: model and data, and the job
    clicks, click_job       clicks with a planted truth, learnt in tables on parameter servers
    table_job           what jobs with tables share
    settings            settings as arguments of a command, since roles are processes
    compare             devices for a job, and its difference from one device
    report              what jobs show: tables, progress and the plot
    libraries/          steps of Flax, nnx and Equinox: a model and its step in each file

They need the extra `examples`: scikit-learn for the data, matplotlib for the plot; those of
libraries `libraries`. They are in the repository alone: the wheel has no example.
"""

import os
from pathlib import Path


ROOT = Path(__file__).parents[1]


def role_path() -> str:
    """Return the PYTHONPATH with which processes that an example starts find it, in whatever
    folder."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
