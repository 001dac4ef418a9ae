"""What Evenload promises, measured: ``python -m benchmarks [name ...] [--quick]``."""
