"""Pipelines: stages of the model, and a schedule of micro-batches (EPL's Parallel).

transform          `pipeline`: a step to a plan
plan               the plan: programs of each stage, and what each device does when
options            what may be asked of it, and its checks
forward_pass       what every micro-batch goes through, before it is differentiated
assign_stages      the stage of each equation
balance            exact cuts of a row of costs
repeated_blocks    layers that repeat
stage_programs     forward and backward of each stage
stage_vjp          what a stage's forward keeps for its backward
stage_scan         loops over layers, cut into one for each stage
staged_model       the model cut into stages, and their programs for any batch
split_stages       stages that are split over several devices
results            how results of micro-batches are merged
update             from sums of gradients to new parameters
update_by_stage    the update, cut by where its inputs live
schedule           what each device does when, as a value
orders             those of the schedules that have a name, and whether any are a schedule
playing            what orders cost: times, ticks, what is in flight
task               a task of a schedule, and when it ran
gantt              schedules, and what really ran, drawn
device_layout      which devices each stage and replica has
"""
