"""Jobs whose reductions XLA carries out: nccl2 mode and sharding.

job       what all of them have in common; on a mesh, or simulated on one device
sharded   the same with slices
cluster   as processes
"""
