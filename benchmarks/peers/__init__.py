"""Programs of other frameworks for the job of `mlp_job.py`, each with its own environment.

`peers.driver` starts all of them in turn. `make peers` runs it.
"""
