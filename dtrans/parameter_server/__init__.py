"""Parameter servers: what Paddle's DistributeTranspiler did to static graphs.

transform          `pserver`: a step to a plan
options            its options: records
plan               the plan: one program for each role
dispatch           Paddle's slice rule and dispatchers
placement          the server of each block
step_traffic       the values that roles send in a step, and their costs
overview           the rows of the step's arrays that each server stores
trainer_program    the programs of trainers
server_program     the programs of servers
geo_sgd            `mode=Geo(...)`: servers that add up what trainers have changed
dc_asgd            gradients compensated for their delay
averaged_leaves    leaves that trainers make and servers average
gradient_merging   ways to merge several steps' gradients that an update allows
"""
