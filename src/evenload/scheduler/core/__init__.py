"""The queue's core, pure: events fold into a state, `decide` looks at it and returns commands. No I/O, no clock, no torch.

A shell (the daemon, or the simulator) does three things with it: it records what happens as events (`core.events`) and
gives them to a `Book`; it asks ``decide(queue_state.snapshot(), now_s)`` for commands; it records each command's own event and
then carries the command out. The same events always fold to the same state, and the same snapshot always gives the same
commands.
"""
