"""Jobs of pipelines: one process drives all stages, or each process drives some.

    stage_devices    the devices of a stage, and how its programs are compiled for them
    stage_placement  a plan on these devices: the places of its state and of batches
    instructions     a step as a list of instructions: run a program, move a value
    slots            the values that instructions work on, and the end of each value
    step_builder     a step while it is written
    micro_batch      a program as a function of the global batch and a micro-batch's index
    compile_step     writes the tasks of the schedule
    compile_update   writes the update, and the merges of results
    state            the state between steps: its creation, checks and reads
    job              `init` and `step`
    processes        the interface to the processes of the stages, and one process
    cluster          several processes
    p2p              channels between processes
    value_types      the types of values that cross them
    profile          measured times of tasks, and bytes of saved values

One thread dispatches everything in the order of the schedule. Devices execute asynchronously.
"""
