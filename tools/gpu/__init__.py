"""Steps compiled for NVIDIA GPUs on a machine without one, and what their programs contain."""
