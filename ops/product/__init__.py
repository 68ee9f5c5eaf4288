"""Products with weights on NVIDIA GPUs of compute capability 9: dense ones and those of experts, by one kernel."""
