"""Parameter servers: Paddle's DistributeTranspiler for JAX programs instead of static graphs.

transform          `pserver`: rewrites a step into a plan
options            records of options: modes, and the placement of blocks
plan               the plan: one program for each role
plan_notes         remarks in a printed plan
dispatch           Paddle's slice rule and dispatchers
placement          the server of each block
overview           the arrays on each server, and their rows in the arrays of the step
server_balance     bytes on each server, for a plan and for other dispatchers
step_traffic       the values that roles send in a step, and their costs
trainer_program    the programs of trainers
trainer_devices    the program of one device, if each trainer has a mesh of devices
server_program     the programs of servers
compression        the types in which gradients and parameters are sent
exchange_rounds    exchange of values between trainers, through servers
geo_sgd            `mode=Geo(...)`: servers add up the changes of trainers
dc_asgd            gradients compensated for their delay
averaged_leaves    leaves without gradients, such as batch statistics, that servers average
gradient_merging   rule that merges the gradients of several steps into one update
state              state of a job in one process
tables             embedding tables: trainers look up single rows
"""
