"""An update on parts of leaves: blocks of rows, and what their owners exchange.

blocks          a block of a leaf, and where blocks live
rounds          which values servers exchange, and when
unit_program    programs of a unit, by level
server_spec     analysis: what each server holds, reads and computes
server_update   the update of each server, as optimize blocks
mean            the mean of what trainers send
partial_init    some rows of what an init makes
"""
