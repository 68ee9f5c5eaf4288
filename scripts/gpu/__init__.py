"""Checks and timings on an NVIDIA GPU."""
