"""The checks: each takes the options and returns one finding; run in child processes only.

A check reads the facts, then hands them to a pure function that judges them, so that each verdict can be tested
without the machine that earns it.
"""
