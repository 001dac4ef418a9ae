"""The parts that strategies compute with: micro-batches, weighting, precision, randomness, BatchNorm over ranks."""
