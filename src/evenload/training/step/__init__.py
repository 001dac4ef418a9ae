"""One global batch: plan, compute, exchange, commit."""
