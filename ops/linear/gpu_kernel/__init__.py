"""Dense and expert products on NVIDIA GPUs: a Mosaic kernel for Hopper and a Triton kernel."""
