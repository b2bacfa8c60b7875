"""Rows of tables in the messages of trainers and servers.

table_rows     row ids of lookups, and their blocks
row_requests   a server's requests for rows, and memory for the gradients of these rows
rows_ahead     announced rows of later steps
row_answers    a synchronous server's answers to lookups, for this step and announced ones
stored_tables  requests between two steps: reports, changed rows, evictions
cached_rows    GEO-SGD: rows that a trainer stores; `id_slots` maps row ids to memory
changed_rows   GEO-SGD: changes by others that a trainer has not received
"""
