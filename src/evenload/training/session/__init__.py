"""One session of a run, from `evenload.init` to the end of the script."""
