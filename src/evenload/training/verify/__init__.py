"""The parts of `evenload verify`: float64, the two sides of the comparison, and the tests for what may be wrong."""
