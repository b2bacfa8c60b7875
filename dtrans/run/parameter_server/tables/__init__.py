"""Tables during a job: on servers, on a mesh, and in trainers.

table_memory   a block in a server's memory; updates read and write some rows
stored_rows    memory of rows that exist (`lazy_memory`), found by their ids (`row_directory`)
row_snapshot   a snapshot of a block's rows, which a thread reads during updates
new_rows       rows that are initialized on first use
row_draws      random numbers with which a row filter admits rows
grouped_rows   new rows of several tables, initialized in one call
missed_steps   missed steps of rows without a gradient; rows catch up before they are read
table_groups   tables whose rows one optimize block updates
row_updates    updates of some rows, on a server and on a mesh (`mesh_tables`)
traced_tables  tables in a step that `plan.verify()` traces
traced_geo     local rows of GEO-SGD trainers in a traced step
row_lookups    lookups of a trainer's steps
background_lookups   lookups of a trainer's steps through a communicator
batch_rows     ids that a batch looks up, computed before its step
job_tables     `job.tables`: lookup, export, report, changed rows and eviction
sent_tables    tables in the messages to a backup
server_tables  reports, changed rows and eviction on a server
"""
