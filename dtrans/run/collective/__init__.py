"""Jobs whose reductions XLA carries out: nccl2 mode and sharding.

job        a plan, running, wherever its trainers are
mesh       trainers on devices of this process
simulate   trainers on one device
cluster    trainers in processes
"""
