"""Observers of the engine: metrics, the trace and the live view."""
