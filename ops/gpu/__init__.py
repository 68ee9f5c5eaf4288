"""What the kernels for GPUs share: tiles, which GPU this is, self-tests, and CUDA graphs."""

from pathlib import Path

# on which the results of all kernels for Hopper depend
TILE_SOURCE = Path(__file__).with_name("tile.py")
