"""Runners: jobs that run plans, and the executor of programs.

    executor            `Executor.run`: runs any program of a job in this process
    base                code that several runners use
    net                 messages over ZeroMQ
    parameter_server    parameter servers: on a mesh, or as processes
    role_jobs           jobs of the processes of parameter servers, and the replay of a job's log
    collective          nccl2 mode and sharding: on a mesh, simulated, or as processes
    pipeline_parallel   pipelines: on a mesh, simulated, or as processes
    distributed         processes: their roles, their launcher, and their rendezvous
    status              status of a running job, from another process
    runners             the list of all runners
    verified            the traced step of a job, which `plan.verify()` evaluates
    replays             sequential references of asynchronous modes, for `plan.verify()`

A *runner* is a function that creates a running job from a plan. It splits the plan's programs at
each send or receive (`base.segments`), and compiles the pieces. Runners register with
`dtrans.plan`, so that the packages of plans need not import this package.
"""
