"""The checks: each takes the options and returns one finding; they run in child processes only.

Where the facts cannot be reproduced by files and a stub driver, a pure function turns them into the finding, for tests.
"""
