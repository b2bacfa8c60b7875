"""Pipelines: stages of the model, and a schedule of micro-batches (EPL's Parallel).

transform          `pipeline`: rewrites a step into a plan
plan               the plan: programs of each stage, and their schedule
options            options of a plan, and their checks
forward_pass       the loss of a micro-batch as one list of equations, not differentiated
assign_stages      the stage of each equation
auto_stages        the number of stages, for "auto"
balance            exact cuts of a row of costs
repeated_blocks    layers that repeat
stage_programs     forward and backward of each stage
stage_vjp          residuals that a stage's forward saves for its backward
stage_scan         scans over layers, cut into one for each stage
staged_model       the model cut into stages, and their programs for any batch
split_stages       stages that are split over several devices
results            merges of the results of micro-batches
update             from sums of gradients to new parameters
update_by_stage    the update, cut by stage
schedule           the order of tasks on each device, as a value
orders             orders of the named schedules, and the check of any others
playing            simulation of orders: times, ticks, micro-batches in flight
task               a task of a schedule, and its start and end
gantt              charts of schedules and of measured runs
device_layout      the devices of each stage and replica
"""
