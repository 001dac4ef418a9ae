"""The queue's daemon: owns the record of a queue, decides, and has runners start and stop programs.

One thread owns the store. It records all that came in, decides, records the commands, commits once, and only then answers
and acts; what it does follows from the record alone, so that a daemon killed at any point is continued by the next.
"""
