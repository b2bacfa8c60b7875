"""Sockets as this package makes them; what goes by them is `dtrans.protocol.wire`.

zmq_transport  ZeroMQ as `dtrans.protocol.transport`
sockets        sockets with limits, and who is let in
keys           which connections are encrypted, and with which keys
net_options    options of connections, and the variables that are their defaults
own_folder     a folder for the Unix socket of a process
started_jobs   jobs that launchers of this user run here, and their tokens
ended_roles    the roles that have ended, as a launcher tells the others
"""
