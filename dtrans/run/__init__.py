"""Realisers, which run plans and programs.

    executor            `Executor.run`: runs any program of a job in this process
    role_job            one process of a job of parameter servers
    base                parts that all realisers share
    net                 messages over ZeroMQ
    parameter_server    parameter servers: on a mesh, or as processes
    collective          nccl2 mode and sharding: on a mesh, simulated, or as processes
    pipeline_parallel   pipelines: on a mesh, simulated, or as processes
    distributed         processes: their roles, their launcher, and their rendezvous
    status              status of a running job, seen from outside
    realisers           the list of all realisers
    verified            the traced step of a job, which `plan.verify()` evaluates
    replays             sequential references of asynchronous modes, for `plan.verify()`

A new realiser takes a plan, or programs, and cuts them by `base.segments` into parts that it
compiles. No package below imports this one: plans find their realisers by `dtrans.plan`.
"""
