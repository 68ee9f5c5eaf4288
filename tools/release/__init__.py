"""Builds release artifacts."""
