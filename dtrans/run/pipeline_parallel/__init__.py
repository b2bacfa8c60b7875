"""Running pipelines: one process drives all stages, or those that are its own.

    stage_devices   where a stage is: devices of its own, or all on one; how its programs are compiled there
    compile_step    a step as a list of instructions: run a program, move a value
    job             `init`, `step`, and the state in between
    cluster, p2p    the same as processes, and their lines to one another
    profile         what really ran when, and what was kept meanwhile

Everything is dispatched by one thread in the order of the schedule; devices work through what they were given.
"""
