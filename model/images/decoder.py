"""Decodes images to patches in worker processes with limits of memory and time."""

import base64
import hashlib
import json
import queue
from dataclasses import dataclass

import numpy as np

from ..extras import import_extra
from ..text.worker import WorkerProcess
from .decode import image_size
from .errors import ImageError
from .header import MAX_PIXELS
from .rule import ImageRule

WORKER = "quire.model.images.worker"
MEMORY = 1 << 30  # bytes of address space of a worker, beyond what its program needs
SECONDS = 20  # processor time per image


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """Patches of an image, in the order in which groups of them become tokens.

    Args:
        patches: uint8 [rows * columns, patch, patch, 3].
        rows: rows of patches in the resized image.
        columns: columns of patches in the resized image.
        digest: 32 bytes that identify rule, grid and patches.
    """

    patches: np.ndarray
    rows: int
    columns: int
    digest: bytes


class ImageDecoder:
    """Owns worker processes that decode images. Thread-safe.

    A process starts with the first image that needs it, and ends with this object.

    Args:
        max_pixels: largest accepted product of width and height.
        workers: maximum number of images that are decoded at the same time; further calls wait.
        memory: bytes of address space that an image may need.
        seconds: processor time that an image may need.
    """

    def __init__(
        self,
        max_pixels: int = MAX_PIXELS,
        workers: int = 1,
        *,
        memory: int = MEMORY,
        seconds: int = SECONDS,
    ):
        import_extra("PIL", "images", "image input")
        self.max_pixels = max_pixels
        self.memory = memory
        self.seconds = seconds
        self._idle: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(WorkerProcess("-m", WORKER, str(memory), str(seconds)))

    def patches(self, data: bytes, rule: ImageRule) -> ImagePatches:
        """Decode an image file and cut it into patches; an unusable image raises `ImageError`.

        Args:
            data: content of a PNG, JPEG, WebP, GIF or BMP file.
            rule: how the model sees images.
        """
        image_size(data, self.max_pixels)  # raises before a worker sees the file
        request = {
            "image": base64.b64encode(data).decode(),
            "rule": rule.to_json(),
            "max_pixels": self.max_pixels,
        }
        worker = self._idle.get()
        try:
            answer = worker.ask(json.dumps(request).encode())
        finally:
            self._idle.put(worker)
        if answer is None:
            raise ImageError(
                f"image could not be decoded with {self.memory >> 20} MiB of memory and "
                f"{self.seconds} s of processor time; send a smaller one"
            )
        if "error" in answer:
            raise ImageError(answer["error"])
        flat_patches = np.frombuffer(base64.b64decode(answer["patches"]), dtype=np.uint8)
        patches = flat_patches.reshape(-1, rule.patch, rule.patch, 3)
        rows = answer["rows"]
        columns = answer["columns"]
        return ImagePatches(patches, rows, columns, patches_digest(rule, rows, columns, patches))


def patches_digest(rule: ImageRule, rows: int, columns: int, patches: np.ndarray) -> bytes:
    """BLAKE2b-256 of an image's rule, grid and patches."""
    grid = [rows, columns]
    description = json.dumps([rule.to_json(), grid], sort_keys=True)
    digest = hashlib.blake2b(description.encode() + b"\n", digest_size=32)
    digest.update(np.ascontiguousarray(patches).data)
    return digest.digest()
