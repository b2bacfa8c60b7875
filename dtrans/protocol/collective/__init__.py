"""Trainers of collective jobs: rendezvous, membership, and the values of pipelines.

join               rendezvous of all trainers; `join_loop` drives it over a transport
membership_table   the trainers that have ended, and if the others can continue
arrivals           the values that a process of a pipeline expects and receives
"""
