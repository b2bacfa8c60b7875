"""Connections between the processes of a job, over ZeroMQ.

`dtrans.protocol.wire` defines the format of messages. A job that survives failures also has a
folder of shared files. There, the launcher writes each *generation* (the time between two
failures), and servers write *snapshots* (copies of their states).

zmq_transport      implementation of `dtrans.protocol.transport` with ZeroMQ
memory_channel     shared memory of two processes of one host
shared_memory      memory files, and the slots of arrays in them
sockets            ZeroMQ sockets with limits and authentication
keys               keys that authenticate processes and encrypt connections
net_options        options of connections, and the environment variables with their defaults
temp_dir           a temporary folder of one process, for its Unix socket
generation_folder  folder in which a launcher and the roles of a job agree on generations and
                   snapshots
launcher_folder    this folder in the launcher, which starts generations
role_folder        this folder in a role, which reports its generation and its snapshots
role_marks         reports of the roles in this folder
generation_log     log of all generations of a job
shared_files       files that processes read while another process replaces them
started_jobs       endpoints and tokens of the jobs that this user has launched on this host
ended_roles        the launcher's report of the roles whose processes have ended
"""
