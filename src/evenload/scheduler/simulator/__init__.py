"""What would happen: discrete events around the same core that the daemon runs, with programs that follow measured tables."""
