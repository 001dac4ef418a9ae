"""One process per attempt of a job: it starts the program, passes on stop requests, ends the whole process tree, and writes the
result to a file. It outlives the daemon, and a later daemon adopts it.
"""
