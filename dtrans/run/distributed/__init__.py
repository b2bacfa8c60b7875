"""Processes of a job: their roles, launcher, rendezvous and failures.

role            role of a process, from environment variables
schedulers      role, from variables of Slurm, Open MPI, torchrun, JobSet and Paddle
rendezvous      rendezvous of the trainers of nccl2 mode
connect         connection of the trainers by `jax.distributed`
gloo            address that Gloo binds
address         addresses of dtrans's own connections between trainers
membership      the job that this process is connected to
board           messages between processes on the key-value store of JAX's coordinator
multihost       global arrays, sums and agreements of all trainers
watch           notice of processes that end
elastic         training that continues without lost trainers
status_door     answers of trainer 0 to `dtrans status`
launcher        launcher of a job's processes, here or at a `Site`
child_process   process of the launcher, with its output
orphan_guard    end of all processes when the launcher itself is killed
"""
