"""An update on parts of leaves: blocks of rows, and what their owners exchange.

blocks          a block of a leaf, and where blocks live
rounds          which values servers exchange, and when
server_update   the work of each server
mean            the mean of what trainers send
partial_init    some rows of what an init makes
"""
