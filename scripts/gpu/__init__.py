"""Correctness checks and timings on an NVIDIA GPU: `python -m quire.scripts.gpu.check`."""
