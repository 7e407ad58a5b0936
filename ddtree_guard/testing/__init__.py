"""Synthetic steps, one fault per rule, and small stand-ins for parts of SGLang that need a GPU."""
