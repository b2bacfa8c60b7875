"""Execution of parameter-server plans: in one process on a mesh of devices, or in many processes.

In one process, on a mesh:

    mesh                the job; `mesh_trainers` has its trainers, `mesh_fabric` its servers
    share_trainers      trainers with different numbers of rows, one after the other on a device
    ordered_job         an asynchronous job whose trainers take turns, for `plan.verify()`

In processes, one for each trainer and each server:

    fabric              executes the communication equations of a program (`dtrans.ops`) by messages
    local_equations     executes the equations that need no message
    server_connections  connections of a trainer to its servers
    block_requests      a trainer's requests for parameters
    background          communication while a trainer computes: `communicator`, `geo`
    communicator_setup  starts the threads of `communicator`
    equation_leaves     arrays that an equation sends or receives
    server              a server process; it runs `dtrans.protocol.server.server_loop`
    server_saves        saves of a server's state: `checkpoints`, `snapshots` and `state_writer`

In both:

    update              a server's compiled update; `sync_update` runs it for a synchronous server
    block_update        updates of single arrays, for asynchronous servers
    tables              embedding tables: only the rows that a step looks up are sent

In a job of several processes, each trainer sends one message to each server in a step, and gets one
answer. The message contains the gradients, a barrier and a request for new parameters. The server
answers after its update. If the optimizer reduces over rows of several servers, the servers
exchange partial results during the update. Every wait has a deadline. If it passes, an error names
the late roles. Messages contain only data: a receiver does not unpickle or execute them. Servers
bind loopback addresses by default. Trainers on a server's host connect to the server by a Unix
socket.

The protocol follows paddle/fluid/operators/distributed/ (request_handler_impl.cc, rpc_server.cc).
"""
