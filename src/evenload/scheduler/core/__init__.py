"""The queue's core, pure: events fold into a state, and `decide` returns commands. No I/O, no clock, no torch.

A shell (the daemon, or the simulator) records events (`core.events`), applies them to a `QueueState`, calls
``decide(state.snapshot(), now_s)``, and records and carries out the commands that it returns.
"""
