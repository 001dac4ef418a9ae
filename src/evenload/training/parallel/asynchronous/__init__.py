"""Strategy ``async``: parameters on a server (rank 0), gradients of whole global batches from workers (docs/async.md)."""
