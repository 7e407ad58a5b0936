"""Faults of the positions family."""
