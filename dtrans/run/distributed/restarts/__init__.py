"""Restarts of lost roles, which begin a new generation (time between two failures) of the job.

A role (server or trainer process) is lost if a signal ended it, or if its host was lost. A snapshot
is a copy of the job's state after a step, on disk. There are two kinds of restarts:

    all roles    the launcher ends the other roles and starts all again, with the same endpoints
    in place     the launcher starts only the lost role; other roles continue from a snapshot. If
                 there is a spare (waiting process), it becomes the lost role.

With `on_trainer_loss="drop"`, a lost trainer does not start again while enough trainers are left.
The other roles go back to a snapshot, and continue without the trainer. This uses no restart. With
`on_trainer_loss="replace"`, the job also continues, and the trainer starts again, which uses a
restart. When it is ready, it joins the job in a new generation.

A restart in place has two conditions. Every other role takes part in the current generation and
still runs, and all servers have a snapshot of the same step. Asynchronous servers have separate
snapshots: only the lost server goes back to its newest snapshot. After the failure of a host, all
roles start again, because all roles of this host are lost. After a restart of all roles, the script
continues from the newest snapshots, or from its newest checkpoint. Each start of all roles has a
new run name, so pieces of checkpoints from different starts never mix.

A role that raised an exception ends the job, since it would raise the exception again. In a job
with snapshots, a role that is lost twice between two snapshots also ends the job, because it would
be lost again.

In `dtrans.run.distributed`, only the launcher imports these modules:

run_attempts       the first attempt at a job, and an attempt after each restart
attempt            one attempt: its running roles, their ends, and the cause of a failure
loss_rules         rules for the failure of a role: a restart, or a job that continues without it
restart_options    the restarts that a launcher may make
joins              a dropped trainer starts again, and joins the job when it is ready
role_starter       starts the process of a role
spares             processes that wait to take the place of a lost role
job_generations    the generations of a job, and the decision whether roles can go back to a
                   snapshot
generation_grants  writes each generation to the log and to the folder of the snapshots
snapshots_at_loss  the servers write their newest states after a failure
lost_reports       reports of roles that have lost another role
job_folder         the folder of a job's snapshots, which one launcher at a time uses
launch_record      the launcher's command line in this folder, for `dtrans launch --resume`
"""
