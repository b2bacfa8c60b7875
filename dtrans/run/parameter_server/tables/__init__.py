"""Embedding tables in a running job: on servers, on a mesh, and in trainers.

A *table* is a parameter with many rows, and a step reads only some of them. Trainers look up these
rows on servers, and send gradients of these rows only. A *block* has the rows of a table on one
server.

table_memory   a block in a server's memory; updates read and write some rows
stored_rows    memory of rows that exist (`lazy_memory`), found by their ids (`row_directory`)
row_snapshot   a snapshot of a block's rows, which a thread reads during updates
new_rows       rows that are initialized on first use
row_draws      random numbers with which a row filter decides to store a row
grouped_rows   new rows of several tables, initialized in one call
missed_steps   updates that rows without a gradient skip, and make up for before they are read
table_groups   tables whose rows are updated together
row_updates    updates of some rows, on a server and on a mesh (`mesh_tables`)
traced_tables  tables in a step that `plan.verify()` traces
traced_geo     rows that GEO-SGD trainers store, in a traced step
row_lookups    lookups of a trainer's steps
background_lookups   lookups of a trainer's steps through a background thread
batch_rows     ids that a batch looks up, computed before its step
job_tables     `job.tables`: lookup, export, report, changed rows and eviction
sent_tables    tables in the messages to a backup server
server_tables  reports, changed rows and eviction on a server
"""
