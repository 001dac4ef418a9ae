"""The commands: one file each, loaded when called; `--help` imports neither torch nor numpy."""
