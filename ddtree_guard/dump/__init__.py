"""Trace dumps: a Step on disk, written atomically and read without trust."""
