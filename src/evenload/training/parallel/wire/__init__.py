"""What gradients look like on the link between machines: one file per format; see docs/wire.md."""
