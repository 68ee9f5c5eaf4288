"""Heads that draft for a model, trained on what it writes itself: `quire train-heads`."""
