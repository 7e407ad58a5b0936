"""Faults of the tree family."""
