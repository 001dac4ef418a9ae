"""The queue's daemon: owns the store, decides, and has runners start and stop programs.

One thread owns the store. It records everything that arrived, decides, records the decisions, commits once, and only then
replies and acts. Its actions follow from the store alone, so that the next daemon continues one that was killed at any point.
"""
