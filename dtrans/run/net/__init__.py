"""Messages over ZeroMQ. Their format is `dtrans.protocol.wire`.

zmq_transport  `dtrans.protocol.transport` over ZeroMQ
sockets        ZeroMQ sockets with limits and authentication
keys           keys that authenticate processes and encrypt connections
net_options    options of connections, and the variables with their defaults
temp_dir       a folder for the Unix socket of a process
started_jobs   jobs that launchers of this user run on this host, and their tokens
ended_roles    the roles that have ended, from the launcher
"""
