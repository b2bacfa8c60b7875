"""Realisers: what turns plans and programs into something that runs.

    executor            `Executor.run`: any one program of a job
    role_job            a job of parameter servers, as one of its processes has it
    base                what all of them share
    net                 messages over ZeroMQ
    parameter_server    parameter servers: on a mesh, or as processes
    collective          nccl2 mode and sharding: on a mesh, simulated, or as processes
    pipeline_parallel   pipelines: on a mesh, simulated, or as processes
    distributed         processes: who they are, and how they find one another
    status              watching a running job from outside
    verified            the traced step of a job, which `plan.verify()` evaluates
    replays             modes whose trainers step by themselves, in one order: the reference of `plan.verify()`

A new realiser takes a plan, or programs, and asks `base.segments` for the parts to compile. No
layer below imports from
here: plans find their realisers by `dtrans.plan`.
"""
