"""Formats of gradients on the link between machines, one file each; see docs/wire.md."""
