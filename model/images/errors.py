"""Errors about images."""


class ImageError(ValueError):
    """An image that cannot be accepted; the message names the value and the limit."""
