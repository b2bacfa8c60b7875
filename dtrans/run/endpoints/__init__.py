"""One process per role, over ZeroMQ.

    wire      messages: a msgpack header and raw frames
    buffers   memory that is received into, and kept
    client    a trainer's connection to one server
    server    a parameter server, synchronous
    peers     a server's lines to other servers
    fabric    carries out the equations of `dtrans.ops` with the above

A step is one exchange between each trainer and each server: gradients, a barrier and a request go out
without waiting, and the new blocks come back when the update is made. Where the optimizer reduces over rows that
live on several servers, those exchange their partial results in the middle of an update. Everything
that waits has a deadline and says who waits for whom. Nothing on the wire is unpickled or run. Servers bind loopback
unless told otherwise, and move trainers on the same host to a Unix socket.

Source of the protocol: paddle/fluid/operators/distributed/ (request_handler_impl.cc, rpc_server.cc).
"""
