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
replica   what each of several trainers begins with (nccl2, sharding)
arrays    small functions of arrays that equations are written with (nccl2, sharding)

sharding          ranks that keep slices of state, gradients, parameters: ZeRO 1, 2 and 3
sharding_options  what may be asked of it, and its checks
rank              the program of a rank
slices            what is cut, along which dimension, and what stays whole
slice_writer      the update, on slices
scatters          how ranks reduce gradients of which each keeps a slice
uses, gathers     where parameters are read, and how they are gathered there (stage 3)
layers, prefetch  loops over layers: gathers in their bodies, and those of the next one ahead of time
from_gradients    results that are computed from gradients in slices
amp               mixed precision and loss scaling
products          gradients of weights, made the way round in which they are kept
owners, owned     whole leaves given to ranks, in the place of slices
bins, owner_writer  where what a rank owns lies, and its update

pipeline          stages of the loss function, and a schedule of micro-batches: EPL's Parallel
pipeline_options  what may be asked of it, and its checks
forward_pass      what every micro-batch goes through, before it is differentiated
stages            which equation is of which stage
partition, repeated  exact cuts of a row of costs; layers that repeat
stage_programs    forward, backward and weights of a stage
differentiated    what a stage's forward keeps for its backward
pipeline_results  what becomes of what micro-batches make
pipeline_update   sums of gradients to new parameters, by the means of nccl2 mode and sharding
placed            a program cut by where its inputs live (the update)
stacks            loops over layers, cut into one for each stage, and rows of their stacks
split, split_*    tensor parallelism: a program whose inputs are cut over shards, as that of one shard
split_stage       stages that are split
"""

from dtrans.transforms.geo_sgd import geo_sgd as geo_sgd
from dtrans.transforms.nccl2 import nccl2 as nccl2
from dtrans.transforms.pipeline import pipeline as pipeline
from dtrans.transforms.pserver import pserver as pserver
from dtrans.transforms.sharding import sharding as sharding
