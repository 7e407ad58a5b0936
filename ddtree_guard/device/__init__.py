"""The device check: one fused Triton launch per verify step, and the read-back of its verdict."""
