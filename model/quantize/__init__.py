"""Quantisation methods that are calibrated on the model's activations or gradients."""
