"""Developer tools, not part of the wheel. Run from the repository root: `python -m
tools.peers.compare`.
"""
