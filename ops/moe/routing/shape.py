"""How rows and pairs lie in the kernels."""

LINE = 32  # experts: a copy brings whole lines, of 128 bytes, of a row's logits
THREADS = 128
TILE = 64  # pairs, experts or places that are compared with as many others at once
