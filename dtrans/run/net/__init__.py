"""Connections between the processes of a job, over ZeroMQ.

`dtrans.protocol.wire` defines the format of messages.

zmq_transport  implementation of `dtrans.protocol.transport` with ZeroMQ
sockets        ZeroMQ sockets with limits and authentication
keys           keys that authenticate processes and encrypt connections
net_options    options of connections, and the environment variables with their defaults
temp_dir       a temporary folder of one process, for its Unix socket
started_jobs   jobs that this user has launched on this host, and their tokens
ended_roles    the roles whose processes have ended, reported by the launcher
"""
