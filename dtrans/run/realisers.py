"""List of all realisers. Importing this module registers them with `dtrans.plan`."""

from dtrans.run import role_job, verified
from dtrans.run.collective import cluster, mesh, simulate
from dtrans.run.parameter_server import mesh as servers
from dtrans.run.pipeline_parallel import cluster as stages, job as pipelines


REALISERS = (cluster, mesh, simulate, role_job, servers, stages, pipelines, verified)
