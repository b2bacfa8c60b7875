"""EPL's interface for pipelines (EPL is Alibaba's Easy Parallel Library for TensorFlow).

config        `Config`: EPL's configuration
parallel      `pipeline`: returns a plan from a configuration
input_files   `slice_files`: the input files of each worker
"""

from dtrans.epl.config import Config as Config
from dtrans.epl.input_files import slice_files as slice_files
from dtrans.epl.parallel import pipeline as pipeline
