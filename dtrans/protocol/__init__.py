"""The protocol of parameter servers, as state machines: messages and the time in, messages and
updates to make out.

No socket, no thread and no clock is in here. Drivers send and wait by a `transport`.

transport         the interface to links, doors and a clock
wire              messages: a msgpack header and raw frames
buffers, inbox    memory that blocks arrive in
token             the job's secret, and what its processes show of it
refusals          what is refused, counted
served            what one server's protocol is about
wait_reminder     when a process that waits says so
presence          the trainers of a server: who may come, and who is late
sync_server       a synchronous server; `trainer_rounds`: exchanges of its trainers; `step_waits`: who is late
async_server      an asynchronous server
server_peers      the other servers of a server;  `exchange` is what they give each other
peer_line         one server's side of one line to another
tables            rows of tables, as trainers and servers speak of them
serving           one server: who is concerned by a message, and its end
server_loop       one server over a transport
job_status        the status of a job, for observers
trainer_line      one trainer's side of one connection
server_link       a trainer's links to its servers, and what waits for their answers
traffic           what a trainer sends and receives beside its steps;  `traffic_loop` is its loop
arrivals          what a process of a pipeline receives
meeting           the trainers of collectives meet;  `meeting_loop` drives it over a transport
roll              the trainers of collectives: who has ended
geo_steps         what a trainer of GEO-SGD pushes and pulls, and when
trainer           one trainer: the messages of its steps;  `operation` is what it waits for
"""
