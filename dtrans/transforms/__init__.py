"""Strategies: pure functions from a traced step to a plan. One file each; none knows how plans are run.

pserver   parameter servers
geo_sgd   parameter servers that add up what trainers have changed by themselves
trainers  the programs of trainers of servers (pserver, geo_sgd)
servers   the programs of servers (pserver, geo_sgd)
dc_asgd   compensation of gradients for their delay (pserver)
averages  leaves that trainers make and servers average (pserver)
linear    what may be made of several steps' gradients before an update (pserver)
nccl2     data parallel over collectives
options   what may be asked of nccl2, and its checks (nccl2)
merges    what becomes of what each trainer makes (nccl2)
reducer   how trainers reduce their gradients (nccl2)
window    several micro-steps with one gradient at their end (nccl2)
joining   how the trainers of a job of processes start (nccl2)
halves    shared by all: the trainer half of a step, with something to do at each gradient
startup   shared by all: which of what init makes is which of what the step takes
"""

from dtrans.transforms.geo_sgd import geo_sgd as geo_sgd
from dtrans.transforms.nccl2 import nccl2 as nccl2
from dtrans.transforms.pserver import pserver as pserver
from dtrans.transforms.sharding import sharding as sharding
