"""Parameter servers that run: on a mesh of devices in one process, or as one process per role.

On a mesh:

    mesh                the job; `mesh_trainers` has its trainers, `mesh_fabric` its servers
    ordered_job         asynchronous roles that take turns, for `plan.verify()`

As processes:

    fabric              carries out the equations of `dtrans.ops`
    server_connections  connections of a trainer to its servers
    background          communication during steps: `communicator`, `geo`
    server              a server process; `dtrans.protocol.server.server_loop` drives it
    checkpoints         folder and names of a server's checkpoints; `state_writer` writes them

In both:

    update              a server's update, compiled; `sync_update` runs it step by step
    block_update        updates block by block, for asynchronous servers
    tables              tables with rows that a step looks up

A step is one exchange between each trainer and each server. Gradients, a barrier and a request go
out without waiting, and new blocks come back after the update. If the optimizer reduces over rows
of several servers, these exchange partial results in the middle of an update. Every wait has a
deadline, whose error names the roles. Messages are data only: nothing is unpickled or run. Servers
bind loopback by default, and move trainers on the same host to a Unix socket.

The protocol follows paddle/fluid/operators/distributed/ (request_handler_impl.cc, rpc_server.cc).
"""
