"""Dumps: steps and findings as a folder of JSON and safetensors that anyone can re-check."""
