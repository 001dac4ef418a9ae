"""Simulate a queue: discrete events around the daemon's own core, with programs that follow measured tables."""
