"""Rows of tables, as trainers and servers speak of them.

table_rows    which rows a step looks up, and which of them each block has
row_requests  a server's side of a lookup: rows that are asked for, and of which rows gradients are
rows_ahead    rows of a step to come
row_answers   a synchronous server's answers to lookups, now and ahead
held_tables   between two steps: reports, rows that have changed, rows that are given up
kept_rows, id_slots, changed_rows    GEO-SGD: rows that a trainer keeps, and what it is told of them
"""
