"""From a model folder to arrays on their devices, and back into files."""
