"""Process groups and small exchanges between ranks. The only holder of process groups."""
