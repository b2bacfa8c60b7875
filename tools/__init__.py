"""Tools of the repository, which are not part of the wheel.

check_prose  the check of docstrings, comments and pages: `python -m tools.check_prose`
namespaces   hosts as network namespaces, for tests and benchmarks
simulate     a seeded simulator of jobs of parameter servers: `python -m tools.simulate`
"""
