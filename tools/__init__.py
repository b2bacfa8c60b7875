"""Tools of the repository, which the wheel does not have.

simulate    a seeded simulator of jobs of parameter servers: `python -m tools.simulate`
"""
