"""Strategies: pure functions from a traced step to a plan. One file each; none knows how plans are run.

pserver   parameter servers
nccl2     data parallel over collectives
halves    shared by all: the trainer half of a step, with something to do at each gradient
startup   shared by all: which of what init makes is which of what the step takes
"""

from dtrans.transforms.nccl2 import nccl2 as nccl2
from dtrans.transforms.pserver import pserver as pserver
