"""Strategies: pure functions from a traced step to a plan. One file each; none knows how plans are run.

pserver   parameter servers
startup   shared by all: which of what init makes is which of what the step takes
"""

from dtrans.transforms.pserver import pserver as pserver
