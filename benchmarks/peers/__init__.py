"""The job of `mlp_job.py` in other frameworks, each in an environment of its own.

`peers.driver` starts all of them in turn. `make peers` runs it.
"""
