"""Jobs of the processes of parameter servers: the role of a process is trainer or pserver.

    cluster             `plan.on_cluster()`: creates the job of this process's role
    role_job            base of the jobs of both roles
    trainer_job         job of a trainer, and `server_job` of a server
    trainer_requests    a trainer's requests between two steps: checkpoints and tables
    trainer_cuts        base of a trainer's cuts; `leaf_cuts` and `geo_cuts` are the two kinds
    cut_file            file of a trainer's cut
    return_to_cut       return of a trainer to a cut, after the failure of a process
    log_replay          `dtrans.replay`: repeats the steps of a job with cuts in one process

A *cut* is a copy of the state, to which a job goes back after the failure of a process. A job gives
the programs of its role to a `dtrans.Executor`. `dtrans.run.parameter_server` executes the
communication of these programs, and writes the cuts of servers.
"""
