"""Division of an optimizer's update among parameter servers.

Each server stores some rows of the parameters, and updates them. Some updates need values of other
rows, such as a norm of all gradients. Servers then exchange values.

blocks          blocks (rows of a parameter on one server), and their placement on servers
rounds          values that servers exchange, and the order of these exchanges
unit_program    programs that update one block, or several parameters together
server_spec     state, inputs and computed values of each server
server_update   the programs that each server runs in a step
divide_update   parts of a server's update, which can run at different times
mean            mean of the trainers' gradients
partial_init    initial values of some rows
"""
