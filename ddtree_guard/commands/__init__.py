"""The commands of `ddtree-guard`, one module each, loaded only when asked for."""
