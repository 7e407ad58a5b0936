"""Faults of the kv family."""
