"""Several hosts: where the roles of a job run, and how they are started there.

host_list       the hosts that a user names, in a file or in short
"""
