"""Kernels for NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU; docs/kernels.md has their ideas and figures."""
