"""Products with weights on NVIDIA GPUs, dense ones and those of experts: by Hopper's own kernel, or
Triton's.
"""
