"""Estimates of bytes, operations and communication of a model, before it is loaded."""
