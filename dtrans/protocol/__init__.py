"""Behaviour of trainers and servers when messages arrive, independent of the network.

Each process runs a state machine. Its inputs are messages and the time, and its outputs are
messages and updates. It uses no sockets, threads or clocks. A loop connects it to a `transport`:
ZeroMQ in real jobs (`dtrans.run.net.zmq_transport`), a virtual network in tests and in
`tools.simulate`.

transport          the interface to connections, listeners and the clock
wire               the format of messages: a msgpack header and raw frames
numbered_messages  numbers of messages, to repeat lost messages after a reconnection
token              the job's secret, and the proofs that a process knows it
generations        the parts of a job between failures, and the snapshots at their starts
buffers, inbox     memory into which arrays are received
row_pieces         arrays that are stored in several pieces
refusals           a counter of refused messages
server_blocks      the parameters and tables of one server
wait_reminder      the times of the log lines of a waiting process
job_status         the status of a job for observers
trainer            a trainer of parameter servers: its steps, connections and communicator
server             a parameter server: its trainers, its updates, its connections to other servers
tables             the exchange of table rows between trainers and servers
collective         trainers of collective jobs: rendezvous, membership, pipeline values
"""
