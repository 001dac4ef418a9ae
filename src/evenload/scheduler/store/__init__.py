"""The queue on disk: a log of events that is only appended to, and tables of what is true now, in one SQLite file.

`QueueStore` is the one writer, `Reader` is for everybody else. What the events mean is `scheduler.core`'s alone.
"""
