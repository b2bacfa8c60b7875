"""Tensor parallelism: chooses the dimension along which each parameter of a layer is sharded.

`dtrans.engine` writes the program.

defaults    chooses the default dimensions
"""
