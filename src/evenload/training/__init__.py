"""One job: `Run` and what it is wired from.

The way through a step: `run` → `session` → `step` → `engine` → `microsteps` → `parallel` → `launch.groups`.
"""
