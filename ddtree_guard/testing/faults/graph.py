"""Faults of the graph family."""
