"""Reads the images of prompts, and places them among the prompts' tokens."""

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..model.images import pixels
from ..model.images.decode import image_size, import_pillow, to_rgb
from ..model.images.decoder import ImageDecoder, ImagePatches, patches_digest
from ..model.images.errors import ImageError
from ..model.images.header import MAX_PIXELS
from ..model.images.rule import AreaSizing, ImageRule, LongestSide, TokenBudget
from ..model.multimodal import Multimodal
from .api.content import MediaUrl, MessageImage
from .api.errors import QueueFull, RequestError
from .api.validation import shown
from .media_fetcher import MediaFetcher
from .request.media import MediaItem, MediaSpan, PromptMedia


class ImageQueue:
    """Limits the clients' requests whose images are read at a time, and the bytes of patches that
    requests hold. Thread-safe.
    """

    def __init__(self, max_requests: int = 8, max_bytes: int = 1 << 30):
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.num_requests = 0
        self.num_bytes = 0
        self.lock = threading.RLock()  # a finalizer may run while this thread holds it

    def __enter__(self) -> "ImageQueue":
        with self.lock:
            if self.num_requests >= self.max_requests:
                raise QueueFull(
                    "queue",
                    f"is full: images of {self.max_requests} requests are being read; try again "
                    "later",
                )
            self.num_requests += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.num_requests -= 1

    def hold(self, num_bytes: int) -> None:
        with self.lock:
            if self.num_bytes + num_bytes > self.max_bytes:
                raise QueueFull(
                    "queue",
                    f"is full: the images of waiting requests take {self.num_bytes >> 20} MiB, of "
                    f"at most {self.max_bytes >> 20}; try again later",
                )
            self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        with self.lock:
            self.num_bytes -= num_bytes


class MediaReader:
    """How one model reads images.

    Args:
        multimodal: The model.
        max_patches: Of an image, after it is resized.
        max_images: Of a prompt.
        max_pixels: Of an image before it is resized.
        fetcher: Reads URLs; None: no URLs are read.
    """

    def __init__(
        self,
        multimodal: Multimodal,
        max_patches: int,
        max_images: int,
        max_pixels: int = MAX_PIXELS,
        fetcher: MediaFetcher | None = None,
    ):
        self.multimodal = multimodal
        self.rule = limited_rule(multimodal.rule, max_patches)
        self.max_patches = max_patches
        self.max_images = max_images
        self.max_pixels = max_pixels
        self.fetcher = fetcher or MediaFetcher()
        self.queue = ImageQueue()

    @cached_property
    def decoder(self) -> ImageDecoder:
        """Decodes files in a process with limits; made for the first file, since it needs Pillow."""
        return ImageDecoder(self.max_pixels)

    def read(
        self, tokens: list[int], images: Sequence[MessageImage], is_client: bool = False
    ) -> tuple[list[int], PromptMedia | None]:
        """A prompt's tokens with as many placeholders as each image has rows, and its media; of a
        prompt without images the tokens and None.

        Args:
            tokens: The prompt, with one placeholder for each image.
            images: PIL images, uint8 arrays [height, width, 3], or the bytes of files.
            is_client: The images come over HTTP: `QueueFull` if too many are being read, or wait.
        """
        placeholder = self.multimodal.layout.placeholder
        count = tokens.count(placeholder)
        if count != len(images):
            raise RequestError(
                images[0].param if images else "prompt",
                f"comes with {len(images)} images, and the prompt has {count} placeholders (token "
                f"{placeholder}); there must be one for each image",
            )
        if len(images) > self.max_images:
            raise RequestError(
                images[self.max_images].param,
                f"is image {self.max_images + 1} of the prompt; at most {self.max_images} are "
                "accepted",
            )
        if not images:
            return tokens, None
        if not is_client:
            return self.place(tokens, [self.item(self.fetch(image)) for image in images])
        with self.queue:
            return self.place(tokens, [self.client_item(self.fetch(image)) for image in images])

    def fetch(self, image: MessageImage) -> MessageImage:
        """The image with its content, if it has a URL."""
        if not isinstance(image.content, MediaUrl):
            return image
        return image._replace(content=self.fetcher.fetch(image.param, image.content.url))

    def client_item(self, image: MessageImage) -> MediaItem:
        """The patches of a client's image, which count until no request needs them."""
        try:
            rows, columns = self.rule.grid(*image_size(image.content, self.max_pixels))
        except ImageError as error:
            raise RequestError(image.param, str(error)) from None
        num_bytes = rows * columns * self.multimodal.tower.patch_values
        self.queue.hold(num_bytes)
        try:
            item = self.item(image)
        except BaseException:
            self.queue.release(num_bytes)
            raise
        weakref.finalize(item, self.queue.release, num_bytes).atexit = False
        return item

    def check_text(self, tokens: Sequence[int]) -> None:
        """Refuse a prompt without images that has a placeholder."""
        placeholder = self.multimodal.layout.placeholder
        if placeholder in tokens:
            raise RequestError(
                "prompt", f"has a placeholder (token {placeholder}), and comes without images"
            )

    def item(self, image: MessageImage) -> MediaItem:
        """The patches of an image."""
        try:
            patches = self.patches(image)
        except ImageError as error:
            raise RequestError(image.param, str(error)) from None
        count = patches.rows * patches.columns
        if count > self.max_patches:
            raise RequestError(
                image.param,
                f"is an image of {patches.rows} x {patches.columns} patches; at most "
                f"{self.max_patches} are accepted",
            )
        return MediaItem(
            int.from_bytes(patches.digest, "little"),
            patches.patches,
            patches.rows,
            patches.columns,
            count // self.multimodal.tower.group,
        )

    def patches(self, image: MessageImage) -> ImagePatches:
        """Cut an image into patches; files are decoded in a process with limits."""
        content = image.content
        if isinstance(content, bytes):
            return self.decoder.patches(content, self.rule)
        if isinstance(content, np.ndarray):
            if content.dtype != np.uint8 or content.ndim != 3 or content.shape[2] != 3:
                raise RequestError(
                    image.param,
                    f"is an array of {content.dtype} {list(content.shape)}; it must be uint8 "
                    "[height, width, 3]",
                )
            content = import_pillow().fromarray(content)
        if not (hasattr(content, "convert") and hasattr(content, "size")):
            raise RequestError(
                image.param,
                f"is {shown(content)}; it must be a PIL image, a uint8 array [height, width, 3] or "
                "the bytes of a file",
            )
        picture = content if content.mode == "RGB" else to_rgb(content)
        patches = pixels.patches(picture, self.rule)
        rows, columns = self.rule.grid(*picture.size)
        digest = patches_digest(self.rule, rows, columns, patches)
        return ImagePatches(patches, rows, columns, digest)

    def place(self, tokens: list[int], items: Sequence[MediaItem]) -> tuple[list[int], PromptMedia]:
        """Replace each placeholder by the tokens of its item, and compute the positions on each
        axis: those of an image are its row and column, and text goes on after the larger of both.
        """
        layout = self.multimodal.layout
        merge = self.multimodal.tower.merge
        remaining = iter(items)
        placed: list[int] = []
        spans: list[MediaSpan] = []
        positions: list[np.ndarray] = []  # [3, ...], of models with axes
        position = 0
        for token in tokens:
            if token != layout.placeholder:
                placed.append(token)
                positions.append(np.full((3, 1), position))
                position += 1
                continue
            item = next(remaining)
            rows = item.rows // merge
            columns = item.columns // merge
            if layout.end is None or layout.row_break is None:
                spans.append(MediaSpan(len(placed), item, 0, item.num_rows))
                placed += [token] * item.num_rows
            else:
                for row in range(rows):
                    spans.append(MediaSpan(len(placed), item, row * columns, columns))
                    separator = layout.end if row == rows - 1 else layout.row_break
                    placed += [token] * columns + [separator]
            grid = np.zeros((3, rows, columns), int)
            grid[1] = np.arange(rows)[:, None]
            grid[2] = np.arange(columns)
            positions.append(position + grid.reshape(3, -1))
            position += max(rows, columns)
        num_axes = self.multimodal.num_axes
        if not num_axes:
            return placed, PromptMedia(spans, np.zeros((0, len(placed)), np.int32))
        shifts_AT = np.concatenate(positions, axis=1) - np.arange(len(placed))
        if tokens[-1] == layout.placeholder:
            # tokens after the prompt go on after its last image
            after = np.full((3, 1), position - len(placed))
            shifts_AT = np.concatenate([shifts_AT, after], axis=1)
        return placed, PromptMedia(spans, shifts_AT.astype(np.int32))


def limited_rule(rule: ImageRule, max_patches: int) -> ImageRule:
    """The rule with images shrunk to at most this many patches, where the rule has a limit."""
    sizing = rule.sizing
    if isinstance(sizing, AreaSizing):
        max_pixels = min(sizing.max_pixels, max_patches * rule.patch**2)
        min_pixels = min(sizing.min_pixels, max_pixels)
        return replace(rule, sizing=replace(sizing, min_pixels=min_pixels, max_pixels=max_pixels))
    if isinstance(sizing, LongestSide):
        # the side of the largest square; the sides of others are at most as long
        groups = math.isqrt(max_patches // rule.merge**2)
        longest = min(sizing.longest, groups * sizing.multiple)
        return replace(rule, sizing=replace(sizing, longest=longest))
    if isinstance(sizing, TokenBudget):
        max_tokens = min(sizing.max_tokens, max_patches // rule.merge**2)
        return replace(rule, sizing=replace(sizing, max_tokens=max_tokens))
    return rule
