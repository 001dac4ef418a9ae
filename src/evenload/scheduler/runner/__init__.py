"""One process for each attempt of a job: it starts the program, passes requests to stop on, ends the whole tree of
processes, and leaves what became of it in a file. It outlives the daemon, and a later daemon takes it over.
"""
