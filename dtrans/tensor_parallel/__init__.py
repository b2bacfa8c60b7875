"""Tensor parallelism: default cuts of a layer's parameters. `dtrans.engine` writes the cut layer.

defaults    default cuts of parameters
"""
