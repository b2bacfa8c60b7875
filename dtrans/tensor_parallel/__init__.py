"""Tensor parallelism: sharding of the parameters of layers in `dtrans.split` scopes.

`dtrans.engine` writes the programs.

mesh_option     the option `mesh`: the number of devices along each axis
defaults        chooses the dimension along which each parameter is sharded
model_axis      the model axis of a mesh: its sharded state, and the program of one of its devices
"""
