"""Parameter servers: Paddle's DistributeTranspiler for JAX programs instead of static graphs.

transform          `pserver`: a step to a plan
options            records of options: modes, and the placement of blocks
plan               the plan: one program for each role
plan_notes         remarks of a printed plan
dispatch           Paddle's slice rule and dispatchers
placement          the server of each block
overview           the arrays on servers, with their rows of the step's arrays
server_balance     bytes of servers, also with different dispatchers
step_traffic       the values that roles send in a step, and their costs
trainer_program    the programs of trainers
server_program     the programs of servers
exchange_rounds    exchange of values between trainers, through servers
geo_sgd            `mode=Geo(...)`: servers add up the changes of trainers
dc_asgd            gradients compensated for their delay
averaged_leaves    leaves that trainers compute and servers average
gradient_merging   merging of several steps' gradients into one update
state              state of a job in one process
tables             leaves whose rows trainers look up
"""
