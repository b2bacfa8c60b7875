"""Running pipelines: one process drives all stages, or those that are its own.

    places    where a stage is: devices of its own, or all on one; how its programs are compiled there
    tape      a step as a list of instructions: run a program, move a value
    job       `init`, `step`, and the state in between
    watch     what really ran when, and what was kept meanwhile

Everything is dispatched by one thread in the order of the schedule; devices work through what they were given.
"""

from dtrans.run.pipeline.job import PipelineJob as PipelineJob, PipelineState as PipelineState, on_mesh, simulated


__all__ = ["PipelineJob", "PipelineState", "on_mesh", "simulated"]
