"""Example models, and the jobs of `dtrans train` and `dtrans example`.

    digits              data, model, batches: all that a training script needs to know
    optimizer_choice    optax optimizers by name, each with a learning rate that suits the digits
    job                 the settings that all roles agree on, and what a trainer hands back
    train_role          one process of the job, in Paddle's words; run by `dtrans launch`
    train               the whole job, on either engine, compared with one device
    characters          the source of Python's standard library, and a transformer that reads it
    pipelined           the job of pipeline mode: in stages, compared with one device
    report              what jobs show: tables, progress and the plot
    libraries/          steps of Flax, nnx and Equinox: a model and its step in each file

They need the extra `examples`: scikit-learn for the data, matplotlib for the plot; those of libraries `libraries`.
"""
