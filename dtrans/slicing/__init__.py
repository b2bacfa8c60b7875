"""Update on parts of leaves: blocks of rows, and the exchange between their servers.

blocks          a block of a leaf, and the placement of blocks
rounds          values that servers exchange, and when
unit_program    programs of a unit, by level
server_spec     analysis: state, inputs and computed values of each server
server_update   update of each server, as optimize blocks
mean            mean of the trainers' gradients
partial_init    some rows of an init's outputs
"""
