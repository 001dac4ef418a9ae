"""The single owner of a job's membership: which ranks compute, and the state of those that return."""
