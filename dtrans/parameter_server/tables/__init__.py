"""Tables: leaves of which a trainer has only the rows that a step looks up.

options         what a user says of a table
lookups         which leaves a step reads by rows alone, and how
trainer_rows    a trainer's half, written for the rows that it looks up
zero_gradient   what an update does to rows whose gradient is zero
touched_rows    a server's update, written for the rows that were looked up
"""
