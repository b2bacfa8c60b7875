"""Processes of a job: their roles, launcher, rendezvous and failures.

role            the role of a process, from environment variables
schedulers      the role, from variables of Slurm, Open MPI, torchrun, JobSet and Paddle
rendezvous      trainers of nccl2 mode wait until all trainers have joined
connect         `dtrans.connect`: trainers join `jax.distributed`
gloo            the address that Gloo binds
address         addresses of dtrans's own connections between trainers
membership      the job that this process is connected to
board           messages between processes on the key-value store of JAX's coordinator
multihost       global arrays, and sums, broadcasts and checks over all trainers
watch           connections by which trainers learn that another trainer has ended
elastic         training that continues without lost trainers
status_door     replies of trainer 0 to `dtrans status`
launcher        starts the processes of a job, on this host or at a `Site`
site            the hosts on which the roles run
child_process   one process of the launcher, and its output
role_output     lines of all roles on the terminal, and log files
restarts        restarts of lost roles, generations and snapshots
compile_cache   JAX's compilation cache, for roles that may start again
identity        the variables of a role, which a spare receives
orphan_guard    kills all processes if the launcher itself is killed
"""
