"""Faults of the logits family."""
