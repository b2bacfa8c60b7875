"""Execution of parameter servers: on a mesh of devices in one process, or as one process per role.

On a mesh:

    mesh                the job; `mesh_trainers` has its trainers, `mesh_fabric` its servers
    ordered_job         an asynchronous job whose roles take turns, for `plan.verify()`

As processes:

    fabric              executes communication equations (`dtrans.ops`) by messages
    server_connections  connections of a trainer to its servers
    background          communication during steps: `communicator`, `geo`
    server              a server process; `dtrans.protocol.server.server_loop` drives it
    checkpoints         folder and names of a server's checkpoints; `state_writer` writes them

In both:

    update              a server's update, compiled; `sync_update` runs it step by step
    block_update        updates of single blocks, for asynchronous servers
    tables              tables, whose rows a step looks up

In a step, each trainer sends one message to each server, and gets one answer. The message has the
gradients, a barrier and a request for new blocks; the server answers after its update. If the
optimizer reduces over rows of several servers, they exchange partial results during the update.
Every wait has a deadline, whose error names the roles. Messages contain data only: a receiver
neither unpickles nor executes them. Servers bind loopback by default. Trainers on the same host
switch to a Unix socket.

The protocol follows paddle/fluid/operators/distributed/ (request_handler_impl.cc, rpc_server.cc).
"""
