"""Handlers of all paths that do not write text, each file with its table of routes."""
