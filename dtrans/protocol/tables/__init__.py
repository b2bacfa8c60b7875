"""Exchange of the rows of embedding tables between trainers and servers.

A table is divided into *blocks* of rows, each on one server. A trainer requests only the rows that
its step looks up. It may *announce* the rows of a later step, that is, request them early.

table_rows     row ids of a lookup, and their distribution over blocks
row_requests   a server's handling of requests for rows, and memory for gradients of these rows
rows_ahead     announced rows: rows that a trainer requests for a later step
row_answers    a synchronous server's answers to lookups
stored_tables  requests between two steps: reports, changed rows, evictions
cached_rows    GEO-SGD: rows that a trainer stores
row_directory  a hash table from ids of rows to numbers
id_slots       slots of rows: each new id gets the next slot
changed_rows   GEO-SGD: rows that other trainers have changed, for each trainer
"""
