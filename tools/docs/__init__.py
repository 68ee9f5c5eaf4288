"""Builds the documentation site: pages from `docs/`, and references generated from the code."""
