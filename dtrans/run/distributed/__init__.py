"""Processes: who they are, how they find one another, and what happens when one ends.

role            what a launched process knows of itself
schedulers      the same, from the variables of Slurm, Open MPI, torchrun, JobSet and Paddle
rendezvous      the trainers of nccl2 mode find one another
connect         they become one job of `jax.distributed`
gloo            where Gloo of each process is reached
elastic         those left of it go on
address         where they reach each other, beside what JAX connects
status_door     trainer 0 answers `dtrans status`
multihost       what they hold together and agree on
membership      the job that this process is in
board           words that processes read from each other, by JAX's coordinator
watch           each process sees how another ends
launcher        starts the processes of a job, here or where a `Site` says
child_process   its processes, and what they print
orphan_guard    ends them when the launcher itself is killed
"""
