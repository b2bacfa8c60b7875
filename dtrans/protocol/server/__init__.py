"""A parameter server: its trainers, its updates and its connections to other servers.

trainer_registry   the trainers of a server: admission, and who is late
sync_server        a synchronous server; `step_waits` knows who is late in a step
trainer_rounds     exchanges of trainers in the middle of a step
async_server       an asynchronous server
server_peers       the other servers; `exchange` is the partial results that they send each other
peer_line          one server's side of one connection to another
serving            dispatch of one server's messages, and its end
server_loop        one server over a transport
"""
