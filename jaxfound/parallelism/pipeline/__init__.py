"""Pipelines: schedules as tables, checked, simulated and run by one executor."""
