"""Parameter servers, running: in one process on a mesh of devices, or as one process per role over
ZeroMQ.

    mesh            a job in one process; mesh_trainers: its trainers; mesh_fabric: servers and communication
    update          what a server does with gradients, compiled; block_update: block by block, for async_server
    exchange        what servers give each other in the middle of an update, packed
    server          every server as a process; `dtrans.protocol.server_loop` is its loop
    checkpoints     what a server saves, and under which names; state_writer: the thread that writes it
    presence        which trainers are there; server_peers: the other servers, and what they have sent
    sync_server     handles messages where updates use all trainers; sync_update: the update of a step
    async_server    the same, where no trainer waits
    fabric          carries out the equations of `dtrans.ops` with the above
    ordered_job     asynchronous roles in one process that take turns, for `plan.verify()`
    background      what a trainer does beside its steps: communicator, geo

A step is one exchange between each trainer and each server: gradients, a barrier and a request go
out without waiting, and the new blocks come back when the update is made. Where the optimizer
reduces over rows that live on several servers, those exchange their partial results in the middle
of an update. Everything that waits has a deadline and says who waits for whom. Nothing on the wire
is unpickled or run. Servers bind loopback unless told otherwise, and move trainers on the same host
to a Unix socket.

Source of the protocol: paddle/fluid/operators/distributed/ (request_handler_impl.cc,
rpc_server.cc).
"""
