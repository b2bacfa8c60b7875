"""Jobs of pipelines: one process runs all stages, or each process runs some of them.

    job              `PipelineJob`: `init` and `step`
    stage_devices    backends: place values on the devices of a stage, and compile programs for them
    stage_placement  a plan with its backend: the devices and shardings of state and batches
    instructions     a step as a list of instructions: run a program, move a value
    slots            the numbered slots that instructions read and write
    step_builder     collects the instructions of a step
    micro_batch      makes a program of a micro-batch a function of the global batch
    compile_step     writes the instructions of the tasks of the schedule
    compile_update   writes the instructions of the update, and of merges of results
    state            the state between steps: created, checked, and converted to the user's pytree
    processes        the methods that differ between one process and several; one process
    cluster          several processes
    p2p              channels between processes
    value_types      the types of the values that processes send
    profile          measures the times of tasks, and the memory of saved values

One thread of a process dispatches all instructions in the order of the schedule. Devices execute
them asynchronously.
"""
