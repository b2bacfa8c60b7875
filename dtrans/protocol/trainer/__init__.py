"""A trainer of parameter servers: the messages of its steps and the answers that it waits for.

server_connection   a connection to one server, which survives a broken network connection
trainer_line        the requests of a trainer to one server
server_link         a `trainer_line` over a transport, and the loop that waits for answers
operation           requests and their pending answers, as explicit state
trainer_steps       the messages of synchronous and asynchronous steps
traffic             the communicator, which sends and receives in the background
traffic_loop        the loop of the communicator
geo_steps           GEO-SGD: when a trainer pushes its changes, and pulls the changes of others
"""
