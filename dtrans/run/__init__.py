"""Realisers: what turns programs into something that runs. One file, or folder, for each way of running.

    pieces      a program, cut at the equations that its fabric must carry out
    batch       how trainers share a batch
    update      what a server does with gradients, compiled; block_update: block by block
    exchange    what servers give each other in the middle of an update, packed
    mesh        the whole job in this process, on a mesh of devices
    trainers    a trainer program for all trainers of a mesh at once
    endpoints   one process per role, over ZeroMQ
    collective  the jobs of nccl2 mode in this process, on a mesh or simulated
    meeting     the trainers of nccl2 mode find one another
    connection  they become one job of `jax.distributed`; survivors: those left of it go on
    together    what they hold together and agree on
    cluster     nccl2 mode as processes, on top of these
    pipeline    stages of a pipeline, in this process or as processes
    executor    `Executor.run`: any one program of a job
    roles       what a launched process knows of itself
    launch      start the processes of a job on this host
    children    its processes, and what they say
    guard       ends them when the launcher itself is killed

A new realiser takes a plan, or programs, and asks `pieces` for the parts to compile; transforms never
import from here.
"""
