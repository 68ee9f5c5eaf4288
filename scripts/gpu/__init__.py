"""Checks and timings on an NVIDIA GPU. Not in the wheel."""
