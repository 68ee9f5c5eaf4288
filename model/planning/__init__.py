"""What a model costs in bytes, operations and traffic, before any of it is loaded."""
