"""From a command to worker processes: devices, supervisor, bootstrap, process groups, clock, throttle."""
