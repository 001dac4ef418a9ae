"""Let the global batch grow between epochs where measured goodput is higher (`batch_max`)."""
