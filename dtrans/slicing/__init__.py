"""Division of an optimizer update among servers: blocks of rows, and exchanges between servers.

blocks          blocks of leaves, units, and the placement of blocks on servers
rounds          values that servers exchange, and the rounds of these exchanges
unit_program    programs that update a unit
server_spec     state, inputs and computed values of each server
server_update   the optimize blocks of each server
divide_update   parts of a server's update, which can run at different times
mean            mean of the trainers' gradients
partial_init    initial values of some rows
"""
