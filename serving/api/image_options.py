"""Checks of an engine's options about images."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...model.config import ModelError

MAX_IMAGES = 16  # of a prompt, by default


def check_image_options(limits: Any, domains: Any, folder: Any) -> None:
    """Check limit_mm_per_prompt, allowed_media_domains and allowed_local_media_path."""
    if limits is not None and not (
        isinstance(limits, Mapping)
        and all(type(limit) is int and limit >= 0 for limit in limits.values())
        and not any(limit for kind, limit in limits.items() if kind != "image")
    ):
        raise ModelError(
            f"limit_mm_per_prompt is {limits!r:.80}; it must be a number of images such as "
            "{'image': 4}, and 0 for everything else, which is not supported"
        )
    is_list = isinstance(domains, Sequence) and not isinstance(domains, str)
    if domains is not None and not (is_list and all(map(is_host, domains))):
        raise ModelError(
            f"allowed_media_domains is {domains!r:.80}; it must be a list of hosts such as "
            "['images.example', 'images.example:8443']"
        )
    if folder is not None and not (isinstance(folder, str) and folder):
        raise ModelError(f"allowed_local_media_path is {folder!r:.80}; it must be a folder")


def is_host(value: Any) -> bool:
    """Whether a value is HOST or HOST:PORT."""
    if not isinstance(value, str):
        return False
    host, _, port = value.partition(":")
    return bool(host) and not set("/@?# *") & set(value) and (not port or port.isdecimal())
