"""Rounding that looks at what a model computes: the inputs of its matrices over calibration text."""
