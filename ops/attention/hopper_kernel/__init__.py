"""The attention kernel for NVIDIA Hopper GPUs, in Pallas; docs/kernels.md explains it."""
