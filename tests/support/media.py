"""Images as clients send them."""

import base64


def data_url(file: bytes, media_type: str = "image/png") -> str:
    """A data: URL with the bytes of a file."""
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"
