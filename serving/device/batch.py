"""The arrays of one step, at one of a few fixed sizes."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from ...model.config import FAR
from ...ops.native.unpack import unpack
from ...ops.sampling import MAX_BANS, MAX_LOGPROBS, SamplingInputs
from ...sharding import struct
from ..api.params import SAMPLING

STOPS = 8  # tokens of a sequence that end a series of steps early


class Size(NamedTuple):
    """A shape that is compiled before the first request: rows, sequences, and rows whose logits are wanted."""

    rows: int
    seqs: int
    samples: int
    paths: int = 1  # so many of the sequences after one another can be paths of drafts of the same one


@struct.dataclass
class Batch:
    """Everything a step needs from the host; one sequence's rows lie together, padding comes last."""

    tokens_T: np.ndarray  # below 0: the name of one that is still on the device, see `scheduler.encode_device_token`
    positions_T: np.ndarray  # -1 in padding
    starts_B1: np.ndarray
    following_B: np.ndarray  # the token after the sequence's last row, where the host knows it
    tables_GBM: tuple[np.ndarray, ...]  # one [B, M] a cache group
    slots_GT: tuple[np.ndarray, ...]  # where each row's key and value go, for each cache group
    owners_T: np.ndarray  # the slot of each row's sequence
    is_prompt_T: np.ndarray
    tracked_T: np.ndarray  # the sequence has penalties, so its tokens are counted
    ahead_T: np.ndarray  # positions are as if all drafts of the step before were right
    sample_rows_R: np.ndarray  # one past the last in padding
    store_R: np.ndarray  # the slot that the token drawn here belongs to, or one past the last
    drafts_R: np.ndarray  # the draft that the token drawn here is compared with, or its name; -1 = none
    depths_R: np.ndarray  # drafts of the sequence before this row
    second_B: np.ndarray  # the position where a sequence's second text begins, where the model tells it from the first
    num_drafts_1: np.ndarray  # how many tokens the step itself is to draft
    follows_1: np.ndarray  # whether the drafter computes these rows too
    sampling: SamplingInputs
    # Where drafts have several paths:
    paths_B: Any = None  # each path is a sequence of the step; its number, from 0
    spares_GAQW: tuple[np.ndarray, ...] = ()  # pages of each sequence's paths, for the places where drafts lie
    adapters_T: Any = None  # where there are adapters: the slot of each row's, or one past the last
    adapters_R: Any = None  # and of those that draw, if it adapts the head


def sizes(
    max_seqs: int, max_rows: int, platform: str = "cpu", max_drafts: int = 0, paths: int = 1, path_rows: int = 1,
    decodes: bool = True,
) -> tuple[Size, ...]:  # fmt: skip
    """Decode sizes by factors of four, and two for steps that carry prompts; with drafts, more for those that verify.

    Where drafts have several paths, a sequence has `path_rows` rows in a step that verifies all of them.

    An encoder never `decodes`: all its steps carry prompts.

    On a GPU decode sizes are by factors of two, and those for prompts by factors of four. Its products take 16 rows at
    least: with fewer, each would wait for a launch that pads its rows.
    """
    gpu = platform == "gpu"
    fewest = 16 if gpu else 4
    decode, seqs = [], fewest
    while seqs < max_seqs:
        decode.append(Size(seqs, seqs, seqs))
        seqs *= 2 if gpu else 4
    top = max(max_seqs, fewest)
    decode.append(Size(top, top, top))
    prompts = {max_rows, min(64, max_rows)}
    if gpu:
        prompts = {max_rows} | {max_rows >> shift for shift in (2, 4, 6) if max_rows >> shift > top}
    verify = set()
    if max_drafts:  # a sequence alone is common, and four times its rows would cost much
        counts = {1: decode[0].seqs, 2: decode[0].seqs} | {size.seqs: size.seqs for size in decode}
        pairs = [(min(count * (1 + max_drafts), max_rows), seqs) for count, seqs in counts.items() if count <= seqs]
        pairs += [(2 * size.seqs, size.seqs) for size in decode if max_drafts > 1 and 2 * size.seqs <= max_rows]
        if gpu:  # blocks of its products: each would pad its rows and cut its results
            pairs = [(min(count + -count % (128 if count > 64 else 16), max_rows), seqs) for count, seqs in pairs]
        verify = {Size(count, seqs, count) for count, seqs in pairs if count != seqs}
        for count in {1, *(size.seqs for size in decode)} if paths > 1 else ():
            verify.add(Size(rows := min(count * path_rows, max_rows), count * paths, rows, paths))
    # More rows than sequences: as many would mean one row from each.
    mixed = {Size(max(count, top + 1), top, max(top, 16)) for count in prompts}
    return tuple(sorted({*decode, *verify, *mixed} if decodes else mixed))


def choose(options: Iterable[Size], rows: int, seqs: int, samples: int, decodes: bool, paths: int = 1) -> Size:
    """The smallest size that holds a step; a size with as many rows as sequences takes one row from each."""
    for size in options:
        holds = size.rows >= rows and size.seqs >= seqs * paths and size.samples >= samples and size.paths == paths
        if holds and (decodes or paths > 1 or size.rows != size.seqs):
            return size
    raise ValueError(f"no step size holds {rows} rows of {seqs} sequences with {samples} samples")


@dataclass(frozen=True)
class Layout:
    """Where a batch's arrays lie in the one buffer that brings them to the device: one transfer a step, not thirty.

    | tokens | positions | starts | tables of each group ... | slots ... | ... | sampling ... |      words of 32 bits

    Replicas have a batch each, one after the other.
    """

    size: Size
    groups: int
    table_width: int
    max_seqs: int
    replicas: int = 1
    listed: int = MAX_LOGPROBS  # log-probabilities of a position
    max_drafts: int = 0  # of a sequence, one after the other
    paths: int = 1
    path_pages: int = 0
    adapters: int = 0  # slots for them

    @cached_property
    def parts(self):
        """The arrays of a batch of padding, the tree that they make up, and the bounds of each in the buffer."""
        batch = empty(self.size, self.groups, self.table_width, self.max_seqs, self.max_drafts)
        if self.paths > 1:
            shape = self.size.seqs // self.size.paths, self.paths, self.path_pages
            spares_GAQW = tuple(np.zeros(shape, np.int32) for _ in range(self.groups))
            batch = batch.replace(paths_B=np.zeros(self.size.seqs, np.int32), spares_GAQW=spares_GAQW)
        if self.adapters:
            batch = batch.replace(
                adapters_T=np.full(self.size.rows, self.adapters, np.int32),
                adapters_R=np.full(self.size.samples, self.adapters, np.int32),
            )
        arrays, tree = jax.tree.flatten(batch)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        return arrays, tree, list(zip([0, *ends], ends, strict=False))

    @cached_property
    def nothing(self) -> np.ndarray:
        """What a step gets in which nobody computes anything."""
        return np.tile(self.padding, self.replicas)

    @cached_property
    def padding(self) -> np.ndarray:
        """A batch of one replica in which nobody does."""
        words = [(array.astype(np.int32) if array.dtype == bool else array).view(np.int32) for array in self.parts[0]]
        return np.concatenate([array.reshape(-1) for array in words])

    @cached_property
    def offsets(self) -> Batch:
        """Where each array begins."""
        _, tree, bounds = self.parts
        return tree.unflatten([first for first, _ in bounds])

    def views(self, buffer: np.ndarray) -> Batch:
        """A batch whose arrays are views of the buffer: what is written there is sent."""
        arrays, tree, bounds = self.parts
        views = [
            buffer[first:last].view(np.int32 if array.dtype == bool else array.dtype).reshape(array.shape)
            for array, (first, last) in zip(arrays, bounds, strict=True)
        ]
        return tree.unflatten(views)

    def read(self, buffer) -> Batch:
        """The batch that a replica's buffer on the device holds."""
        arrays, tree, _ = self.parts
        return tree.unflatten(unpack(buffer, arrays))


def param_arrays(rows: int) -> dict[str, np.ndarray]:
    """The sampling parameters that rows carry, as padding has them."""
    carried = {name: declaration.padding for name, declaration in SAMPLING.items() if declaration.padding is not None}
    return {
        f"{name}_R": np.full(rows, padding, np.float32 if isinstance(padding, float) else np.int32)
        for name, padding in carried.items()
    }


def empty(size: Size, num_groups: int, table_width: int, max_seqs: int, max_drafts: int = 0) -> Batch:
    """A batch of nothing but padding: rows that write to the dummy page and draw for nobody."""
    T, B, R, i32 = size.rows, size.seqs, size.samples, np.int32
    return Batch(
        tokens_T=np.zeros(T, i32),
        positions_T=np.full(T, -1, i32),
        starts_B1=np.zeros(B + 1, i32),
        following_B=np.zeros(B, i32),
        tables_GBM=tuple(np.zeros((B, table_width), i32) for _ in range(num_groups)),
        slots_GT=tuple(np.zeros(T, i32) for _ in range(num_groups)),
        owners_T=np.zeros(T, i32),
        is_prompt_T=np.zeros(T, bool),
        tracked_T=np.zeros(T, bool),
        ahead_T=np.zeros(T, bool),
        sample_rows_R=np.full(R, T, i32),
        store_R=np.full(R, max_seqs, i32),
        drafts_R=np.full(R, -1, i32),
        depths_R=np.zeros(R, i32),
        second_B=np.full(B, FAR, i32),
        num_drafts_1=np.zeros(1, i32),
        follows_1=np.zeros(1, bool),
        sampling=SamplingInputs(
            slots_R=np.zeros(R, i32),
            bias_rows_R=np.zeros(R, i32),
            drafted_RJ=np.full((R, 1 + max_drafts), -1, i32),
            positions_R=np.zeros(R, i32),
            seeds_R2=np.zeros((R, 2), np.uint32),
            **param_arrays(R),
            ban_stop_R=np.zeros(R, bool),
            ban_RX=np.full((R, MAX_BANS), -1, i32),
            targets_R=np.full(R, -1, i32),
            biased_R=np.zeros(R, bool),
            wants_logprobs_R=np.zeros(R, bool),
        ),
    )
