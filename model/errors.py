"""What is wrong with a model."""


class ModelError(ValueError):
    """A model folder, configuration or weight that cannot be used; the message says what would be right."""
