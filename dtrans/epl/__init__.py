"""EPL's interface over pipelines.

input_files   which files each worker reads
"""

from dtrans.epl.input_files import slice_files as slice_files
