"""Tools of the repository, which the wheel does not have.

check_prose  the check of docstrings, comments and pages: `python -m tools.check_prose`
simulate     a seeded simulator of jobs of parameter servers: `python -m tools.simulate`
"""
