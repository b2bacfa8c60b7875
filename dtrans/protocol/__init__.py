"""State machines of the protocol: messages and the time in, messages and updates out.

They hold no socket, no thread and no clock. Drivers send and wait by a `transport`: ZeroMQ in jobs
(`dtrans.run.net.zmq_transport`), a virtual network in tests and in `tools.simulate`.

transport        the interface to links, doors and a clock
wire             messages: a msgpack header and raw frames
token            the job's secret, and the proofs that processes show of it
buffers, inbox   memory that blocks arrive in
refusals         a count of refused messages
server_blocks    the blocks and tables of one server
wait_reminder    the times at which a process logs for whom it waits
job_status       the status of a job, for observers
trainer          a trainer of parameter servers: its steps, its connections, its communicator
server           a parameter server: its trainers, its updates, its connections to other servers
tables           rows of tables, as trainers and servers exchange them
collective       trainers of collective jobs: rendezvous, membership, values of pipelines
"""
