"""EPL's interface over pipelines.

config        its configuration: `Config`
parallel      `pipeline`: a plan from a configuration
input_files   the input files of each worker
"""

from dtrans.epl.config import Config as Config
from dtrans.epl.input_files import slice_files as slice_files
from dtrans.epl.parallel import pipeline as pipeline
