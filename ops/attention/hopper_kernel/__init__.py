"""The attention kernels for NVIDIA GPUs (Hopper and later), in Pallas; docs/kernels.md explains
them.
"""
