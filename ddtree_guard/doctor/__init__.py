"""`ddtree-guard doctor`: what a deployment would do, asked before it serves or while it does.

`survey` looks at this environment, `deployment` holds a server's configuration, `predict` runs the
catalogue's rules on it, `faults` knows what releases are known to do, `client` and `canary` ask a
running server, `verdict` sums up and `text` writes.
"""
