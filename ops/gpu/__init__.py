"""Kernels for NVIDIA GPUs from Hopper on, in Pallas for Mosaic GPU. The ideas and figures are in docs/kernels.md."""
