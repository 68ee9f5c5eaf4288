"""Sizes of the Hopper kernels."""

LINE = 32  # experts: logits are copied in whole lines of 128 bytes
THREADS = 128
TILE = 64  # pairs, experts or places: tiles of TILE x TILE are compared at once
