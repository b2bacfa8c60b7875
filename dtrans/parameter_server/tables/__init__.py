"""Tables: leaves that trainers have by rows only: the rows that a step looks up.

options         options of a table
lookups         search for leaves that a step reads by rows only
trainer_rows    a trainer's half, written for the rows that it looks up
zero_gradient   effect of an update on rows whose gradient is zero
touched_rows    a server's update, written for the rows that were looked up
"""
