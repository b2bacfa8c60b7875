"""Tables where they run: on a server, on a mesh, and as a trainer uses them.

table_memory   a block in a server's memory: rows are taken, and put back (`lazy_memory`)
row_snapshot   its rows at one moment, read during updates
new_rows       rows that are initialized on first use
missed_steps   rows without a gradient catch up
row_updates    updates of some rows, on a server and on a mesh (`mesh_tables`)
traced_tables  tables in a step that is traced to be verified
traced_geo     local rows of GEO-SGD trainers in such a step
row_lookups    lookups of a trainer's steps
batch_rows     rows that a batch looks up, before its step
job_tables     `job.tables`: lookup, export, report, changed rows and eviction
server_tables  reports, changed rows and eviction on a server
"""
