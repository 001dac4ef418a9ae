"""One job: `Run` and what it is wired from.

The way through a step: `run` → `sitting` → `step` → `engine` → `microsteps` → `parallel` → `launch.groups`.
"""
