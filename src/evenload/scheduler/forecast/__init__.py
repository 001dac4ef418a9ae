"""When each waiting job is expected to start, and each job to end, and why it is in its state. Pure; reads plans of the core."""
