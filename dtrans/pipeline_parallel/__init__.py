"""Pipelines: the model's layers run on several devices, and batches flow through in micro-batches.

A *stage* is a part of the model, on one device. A *micro-batch* is a part of the batch. While one
stage computes a micro-batch, other stages compute other micro-batches. A *schedule* orders these
tasks. This package plans a pipeline; `dtrans.run.pipeline_parallel` runs it. The interface follows
`Parallel` of EPL (Alibaba's Easy Parallel Library).

transform          `pipeline`: rewrites a step into a plan
plan               the plan: programs of each stage, and their schedule
options            options of a plan, which check their values
forward_pass       the loss function of a micro-batch as one list of equations
assign_stages      assigns each equation to a stage
auto_stages        chooses the number of stages for `num_stages="auto"`
balance            divides a list of costs into parts of similar cost
repeated_blocks    finds repeated layers in a model
stage_programs     writes the forward and backward programs of each stage
gather_params      gathers the parameters that replicas store as slices
stage_vjp          differentiates one stage and selects the residuals that it saves
stage_scan         divides a scan over layers into one scan for each stage
unstacked_inputs   replaces stacked inputs of a function by the rows of each stage
staged_model       the model's stages, and the programs of the stages for any batch size
dynamic_scale      scales the loss by a dynamic scale, and skips steps whose gradients overflow
split_stages       applies tensor parallelism inside a stage (`dtrans.split`)
results            merges the results of micro-batches and replicas
update             writes the update, which computes new parameters from sums of gradients
update_by_stage    divides the update into pieces; each piece runs on one stage
schedule           `Schedule`: the order of tasks on each device
orders             orders of the named schedules, and checks of user-written orders
task               `Task`, the dependencies of tasks, and the simulation of their times
gantt              draws schedules and measured runs
uneven_batch       plans the last batch of an epoch, with another number of micro-batches
device_layout      assigns devices to stages and replicas
"""
