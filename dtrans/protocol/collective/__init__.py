"""Trainers of jobs without parameter servers: rendezvous, membership, and pipeline values.

Such a job is called collective: its trainers all-reduce their gradients, or form a pipeline.

join               rendezvous of all trainers
join_loop          loops of the rendezvous over a transport
membership_table   the progress and the end of each trainer
arrivals           the values that a process of a pipeline receives from other processes
"""
