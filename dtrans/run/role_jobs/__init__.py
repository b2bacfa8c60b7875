"""Jobs for processes of parameter-server training: each process is one trainer or one server.

    cluster               `plan.on_cluster()`: creates the job of the calling process
    role_job              base class of both kinds of jobs
    trainer_job           job of a trainer process
    server_job            job of a server process
    trainer_requests      requests of a trainer between two steps, such as saving a checkpoint
    trainer_snapshots     base class for snapshots of a trainer's state
    leaf_snapshots        snapshots of synchronous trainers
    geo_snapshots         snapshots of trainers with GEO-SGD
    snapshot_file         file format of a trainer's snapshot
    return_to_snapshot    return of a trainer to a snapshot, after another process has failed
    log_replay            `dtrans.replay`: recomputes a finished job in one process

A *snapshot* is a copy of the job's state after a step. After the failure of a process, the job
continues from a snapshot. A job runs the programs of its role with a `dtrans.Executor`. The code in
`dtrans.run.parameter_server` sends their messages, and writes the snapshots of servers.
"""
