"""Faults of the mask family."""
