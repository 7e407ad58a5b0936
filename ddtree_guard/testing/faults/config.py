"""Faults of the config family."""
