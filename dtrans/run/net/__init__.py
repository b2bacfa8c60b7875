"""Connections between the processes of a job, over ZeroMQ.

`dtrans.protocol.wire` defines the format of messages. A job that survives failures also has a
folder of shared files. There, the launcher writes each *epoch* (the time between two failures), and
servers write *cuts* (snapshots of their states).

zmq_transport    implementation of `dtrans.protocol.transport` with ZeroMQ
sockets          ZeroMQ sockets with limits and authentication
keys             keys that authenticate processes and encrypt connections
net_options      options of connections, and the environment variables with their defaults
temp_dir         a temporary folder of one process, for its Unix socket
epoch_folder     folder in which a launcher and the roles of a job agree on epochs and cuts
launcher_folder  this folder in the launcher, which starts epochs
role_folder      this folder in a role, which reports its epoch and its cuts
role_marks       reports of the roles in this folder
epoch_log        log of all epochs of a job
shared_files     files that processes read while another process replaces them
started_jobs     endpoints and tokens of the jobs that this user has launched on this host
ended_roles      the launcher's report of the roles whose processes have ended
"""
