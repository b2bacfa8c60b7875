"""EPL's interface for pipelines (EPL is Alibaba's Easy Parallel Library for TensorFlow).

config        `Config`: EPL's configuration; `init`: sets the configuration of later calls
graph_keys    `GraphKeys`: EPL's names for the ways to merge an output of all replicas
input_files   `slice_files`: the input files of each worker
parallel      `pipeline`: returns a plan from a configuration

EPL's scopes `replicate` and `split` are `dtrans.replicate` and `dtrans.split`.
"""

from dtrans.epl.config import Config as Config, init as init
from dtrans.epl.graph_keys import GraphKeys as GraphKeys
from dtrans.epl.input_files import slice_files as slice_files
from dtrans.epl.parallel import pipeline as pipeline
from dtrans.step.scopes import replicate as replicate, split as split
