"""Strategies: pure functions from a traced step to a plan. One file each; none knows how plans are run."""

from dtrans.transforms.pserver import pserver as pserver
