"""Forecasts of jobs: why each is in its state, and its expected start and end. Pure; reads plans of the core."""
