"""Example models, and the main job: `dtrans train`.

    digits        data, model, batches: all that a training script needs to know
    optimizers    optax optimizers by name, each with a learning rate that suits the digits
    job           the settings that all roles agree on, and what a trainer hands back
    role          one process of the job, in Paddle's words; run by `dtrans launch`
    train         the whole job, on either engine, compared with one device
    report        what it shows: tables and the plot

They need the extra `examples`: scikit-learn for the data, matplotlib for the plot.
"""
