"""Tables: leaves that trainers request by rows instead of in full, such as embedding tables.

options         options of a table
choose          choice of a plan's tables, and of the update of each
lookups         search for leaves that a step reads by rows only
refused_leaves  reasons why a leaf is no table
row_picks       equations that read rows of a leaf by id
row_runs        static slices of tables, as lookups of consecutive rows
pick_ids        row ids of lookups, computed before loops and branches
trainer_rows    forward and backward of a trainer, written for the rows that it looks up
wide_ids    row ids before JAX truncates them to 32 bits
zero_gradient   effect of an update on rows whose gradient is zero
frozen_tables   tables that the step does not train
touched_rows    a server's update, written for the rows that were looked up
own_update      a trainer's update of the rows that it looks up (GEO-SGD)
"""
