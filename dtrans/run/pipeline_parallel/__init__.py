"""Jobs of pipelines: one process runs all stages, or each process runs some of them.

A *stage* is a part of the model, on its own devices. A step is a list of *instructions*: run a
program on a stage, or move a value to another stage. Instructions read and write values in numbered
*slots*.

    job              `PipelineJob`: `init` and `step`
    stage_devices    backends: place values on the devices of a stage, and compile programs for them
    stage_placement  chooses the devices and shardings of state and batches
    instructions     a step as a list of instructions: run a program, move a value
    slots            the numbered slots that instructions read and write
    step_builder     collects the instructions of a step
    micro_batch      converts a micro-batch's program to a function of the global batch
    compile_step     writes the instructions of the schedule's tasks
    compile_update   writes the instructions of the update, and of merges of results
    state            the state between steps: creation, checks, conversion to the user's pytree
    processes        the methods that differ between jobs of one process and of several
    cluster          jobs of several processes
    p2p              channels between processes
    value_types      the types of the values that processes send
    profile          measures the times of tasks, and the memory of saved values

One thread of a process dispatches all instructions in the order of the schedule. Devices execute
the instructions asynchronously.
"""
