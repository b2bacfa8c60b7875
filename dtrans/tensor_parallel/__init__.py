"""Tensor parallelism: which parameters of a layer are cut. `dtrans.engine` writes the layer on its
pieces.

defaults    which parameters of a layer are cut where the user does not say
"""
