"""Running pipelines: one process drives all stages, or those that are its own.

    stage_devices   where a stage is: devices of its own, or all on one; how its programs are compiled there
    deployment      a plan on its devices: where the arrays of its state and of batches are
    instructions    a step as a list of instructions: run a program, move a value
    slots           what the instructions work on, and when each slot is empty
    draft           a step while it is written
    micro_batch     a program as a function of the whole batch and the number of a micro-batch
    compile_step    writes the tasks of the schedule; compile_update the update, and what merges results
    state           the state between steps: how it is made, checked and read
    job             `init` and `step`
    processes       what a job asks of the processes that its stages are in; cluster, p2p: of several, and their lines
    profile         what really ran when, and what was kept meanwhile

Everything is dispatched by one thread in the order of the schedule; devices work through what they
were given.
"""
