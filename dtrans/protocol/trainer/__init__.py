"""A trainer of parameter servers: the messages of its steps and the answers that it waits for.

trainer_line    one trainer's side of one connection
server_link     connections to servers, and the waits for their answers
operation       requests and their pending answers, as explicit state
trainer_steps   the messages of synchronous and asynchronous steps
traffic         a communicator: sends and receives in the background; `traffic_loop` is its loop
geo_steps       GEO-SGD: the steps after which a trainer pushes and pulls
"""
