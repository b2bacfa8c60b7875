"""List of all runners, which create running jobs from plans.

Importing this module registers them with `dtrans.plan`.
"""

from dtrans.run import verified
from dtrans.run.collective import cluster, mesh, simulate
from dtrans.run.parameter_server import mesh as servers
from dtrans.run.pipeline_parallel import cluster as stages, job as pipelines
from dtrans.run.role_jobs import cluster as roles


RUNNERS = (cluster, mesh, simulate, roles, servers, stages, pipelines, verified)
