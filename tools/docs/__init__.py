"""The documentation as a site: pages of `docs/`, and references that are made of the code."""
