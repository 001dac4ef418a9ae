"""The queue on disk: an append-only log of events, and tables of the current state, in one SQLite file.

`QueueStore` is the only writer, `Reader` is for everything else. `scheduler.core` alone interprets the events.
"""
