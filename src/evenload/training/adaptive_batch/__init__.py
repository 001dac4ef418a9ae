"""Let the global batch grow where measured goodput is higher, between epochs and on other devices (`batch_max`)."""
