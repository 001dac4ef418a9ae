"""Split a model that is too large for one device over several devices of one process (`evenload.place`)."""
