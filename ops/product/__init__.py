"""Products with weights on NVIDIA GPUs, dense ones and those of experts: a kernel for Hopper, and Triton's elsewhere."""
