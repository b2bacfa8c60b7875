"""Tables during a job: on servers, on a mesh, and in trainers.

table_memory   a block in a server's memory (`lazy_memory`); updates read and write some rows
row_snapshot   a snapshot of a block's rows, which a thread reads during updates
new_rows       rows that are initialized on first use
missed_steps   missed steps of rows without a gradient; rows catch up before they are read
row_updates    updates of some rows, on a server and on a mesh (`mesh_tables`)
traced_tables  tables in a step that `plan.verify()` traces
traced_geo     local rows of GEO-SGD trainers in a traced step
row_lookups    lookups of a trainer's steps
batch_rows     ids that a batch looks up, computed before its step
job_tables     `job.tables`: lookup, export, report, changed rows and eviction
sent_tables    tables in the messages to a backup
server_tables  reports, changed rows and eviction on a server
"""
