"""The queue's core, pure: events fold into a state, and `decide` returns commands. No I/O, no clock, no torch.

A shell (the daemon, or the simulator) does three things with it: it records what happens as events (`core.events`) and
applies them to a `QueueState`; it calls ``decide(state.snapshot(), now_s)``, which returns events to come; it records each
and then carries it out. The same events always fold to the same state, and the same snapshot always gives the same
commands.
"""
