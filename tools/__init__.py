"""Developer tools, outside of the wheel: `python -m tools.peers.compare`, from the repository
root.
"""
