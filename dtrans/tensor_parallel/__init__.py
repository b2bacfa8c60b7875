"""Tensor parallelism: default cuts of a layer's parameters; `dtrans.engine` writes the program.

defaults    choice of the default cuts
"""
