"""Tables where they run: on a server, on a mesh, and what a trainer asks of them.

table_memory    a block in a server's memory: rows taken out, and put back (`lazy_memory`)
row_snapshot    its rows at one moment, read while it goes on
new_rows        rows on first use
missed_steps    rows that nobody looked up catch up
row_updates     an update of some rows, on a server and on a mesh (`mesh_tables`)
traced_tables   tables in a step that is traced to be verified; traced_geo: rows that trainers of GEO-SGD keep
job_tables      `job.tables`: lookup, export, report, changed rows and eviction, as a trainer calls them
batch_rows      the rows that a batch looks up, before its step
server_tables   the server's side: reports, changed rows and eviction
"""
