"""Faults of the accept family."""
