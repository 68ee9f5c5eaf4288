"""Code shared by the GPU kernels: tile operations, device properties, self-tests, CUDA graphs."""

from pathlib import Path

# a source file on which the results of all Hopper kernels depend, for their self-tests' cache
TILE_SOURCE = Path(__file__).with_name("tile.py")
