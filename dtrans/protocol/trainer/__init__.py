"""A trainer of parameter servers: its connections, the messages of its steps, and the answers.

A trainer sends gradients to the servers and receives parameters. With a *communicator*, a second
thread does this while the trainer computes.

server_connection   a connection to one server, which survives a broken network connection
trainer_line        the requests of a trainer to one server
server_link         a `trainer_line` over a transport, and the loop that waits for answers
operation           pending answers to requests
trainer_steps       the messages of synchronous and asynchronous steps
announced_lookups   lookups of table rows that a trainer has requested for later steps
traffic             the communicator, which sends and receives in the background
traffic_loop        the loop of the communicator
geo_steps           GEO-SGD: pushes of a trainer's changes, and pulls of other trainers' changes
"""
