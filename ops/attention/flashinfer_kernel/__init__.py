"""FlashInfer's attention kernels for NVIDIA GPUs: their plan for a step, their build and call."""
