"""Attention by FlashInfer's kernels for NVIDIA GPUs: what they are told, and how they are built and
called.
"""
