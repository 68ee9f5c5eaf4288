"""The input arrays of a step, at one of a few fixed sizes."""

from functools import cached_property

import jax
import numpy as np

from ...model.config import FAR
from ...ops.native.unpack import unpack
from ...ops.sampling import MAX_BANS, SamplingInputs
from ...sharding import struct
from ...sharding.struct import Leaf
from ..api.params import SAMPLING
from .step_shape import StepShape

STOPS = 8  # tokens of a sequence that end a series of steps early


class Batch(struct.PyTreeNode):
    """The host's input of a step; the tokens of a sequence are adjacent, and padding comes last."""

    # below 0: the name of one that is still on the device, see `scheduler.encode_device_token`
    tokens_T: Leaf
    positions_T: Leaf  # -1 in padding
    starts_B1: Leaf
    following_B: Leaf  # the token after the sequence's last row, where the host knows it
    tables_GBM: tuple[Leaf, ...]  # one [B, M] a cache group
    slots_GT: tuple[Leaf, ...]  # where each row's key and value go, for each cache group
    owners_T: Leaf  # the slot of each row's sequence
    is_prompt_T: Leaf
    tracked_T: Leaf  # the sequence has penalties, so its tokens are counted
    ahead_T: Leaf  # positions are as if all drafts of the step before were right
    sample_rows_R: Leaf  # one past the last in padding
    store_R: Leaf  # the slot that the token drawn here belongs to, or one past the last
    # the draft that the token drawn here is compared with, or its name; -1 = none
    drafts_R: Leaf
    depths_R: Leaf  # drafts of the sequence before this row
    # the position where a sequence's second text begins, where the model tells it from the first
    second_B: Leaf
    num_drafts_1: Leaf  # how many tokens the step itself is to draft
    prefills_1: Leaf  # whether the drafter computes these rows too
    sampling: SamplingInputs
    adapters_T: Leaf = (
        None  # where there are adapters: the slot of each row's, or one past the last
    )
    adapters_R: Leaf = None  # and of those that draw, if it adapts the head
    # Of models that read media. The row of the media store that is a token's embedding, or -1.
    media_T: Leaf = None
    # how many later positions a token attends to: the rest of its image
    span_ahead_T: Leaf = None
    # A token's position on each axis of the rotary embedding, minus its position in the sequence.
    shifts_AT: Leaf = None


class BatchLayout:
    """Where a batch's arrays lie in the one buffer that brings them to the device: one transfer a
    step, not thirty.

    | tokens | positions | starts | tables of each group ... | slots ... | ... | sampling ... |      words of 32 bits

    Replicas have a batch each, one after the other.
    """

    def __init__(self, shape: StepShape):
        self.shape = shape

    @cached_property
    def parts(self):
        """(arrays of an all-padding batch, their tree structure, where each begins and ends in the
        buffer).
        """
        batch = empty(self.shape)
        arrays, tree = jax.tree.flatten(batch)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        return arrays, tree, list(zip([0, *ends], ends, strict=False))

    @cached_property
    def nothing(self) -> np.ndarray:
        """The buffer of an empty step, for all replicas."""
        return np.tile(self.padding, self.shape.num_replicas)

    @cached_property
    def padding(self) -> np.ndarray:
        """The buffer of an empty step, for one replica."""
        words = [
            (array.astype(np.int32) if array.dtype == bool else array).view(np.int32)
            for array in self.parts[0]
        ]
        return np.concatenate([array.reshape(-1) for array in words])

    @cached_property
    def offsets(self) -> Batch:
        """The offset of each array in the buffer."""
        _, tree, bounds = self.parts
        return tree.unflatten([first for first, _ in bounds])

    def views(self, buffer: np.ndarray) -> Batch:
        """Views of a buffer's arrays, to write a batch."""
        arrays, tree, bounds = self.parts
        views = [
            buffer[first:last]
            .view(np.int32 if array.dtype == bool else array.dtype)
            .reshape(array.shape)
            for array, (first, last) in zip(arrays, bounds, strict=True)
        ]
        return tree.unflatten(views)

    def read(self, buffer) -> Batch:
        """The batch in a replica's buffer on the device."""
        arrays, tree, _ = self.parts
        return tree.unflatten(unpack(buffer, arrays))


def param_arrays(rows: int) -> dict[str, np.ndarray]:
    """Arrays of the sampling parameters with padding values."""
    carried = {
        name: declaration.padding
        for name, declaration in SAMPLING.items()
        if declaration.padding is not None
    }
    return {
        f"{name}_R": np.full(rows, padding, np.float32 if isinstance(padding, float) else np.int32)
        for name, padding in carried.items()
    }


def empty(shape: StepShape) -> Batch:
    """A batch of padding: it writes to the dummy page and samples for no slot."""
    T = shape.size.rows
    B = shape.size.seqs
    R = shape.size.samples
    i32 = np.int32
    batch = Batch(
        tokens_T=np.zeros(T, i32),
        positions_T=np.full(T, -1, i32),
        starts_B1=np.zeros(B + 1, i32),
        following_B=np.zeros(B, i32),
        tables_GBM=tuple(np.zeros((B, shape.table_width), i32) for _ in range(shape.num_groups)),
        slots_GT=tuple(np.zeros(T, i32) for _ in range(shape.num_groups)),
        owners_T=np.zeros(T, i32),
        is_prompt_T=np.zeros(T, bool),
        tracked_T=np.zeros(T, bool),
        ahead_T=np.zeros(T, bool),
        sample_rows_R=np.full(R, T, i32),
        store_R=np.full(R, shape.max_seqs, i32),
        drafts_R=np.full(R, -1, i32),
        depths_R=np.zeros(R, i32),
        second_B=np.full(B, FAR, i32),
        num_drafts_1=np.zeros(1, i32),
        prefills_1=np.zeros(1, bool),
        sampling=SamplingInputs(
            slots_R=np.zeros(R, i32),
            bias_rows_R=np.zeros(R, i32),
            drafted_RJ=np.full((R, 1 + shape.max_drafts), -1, i32),
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
    if shape.reads_media:
        batch = batch.replace(media_T=np.full(T, -1, i32))
    if shape.sees_spans and shape.size.rows > shape.size.seqs:  # else each has one row
        batch = batch.replace(span_ahead_T=np.zeros(T, i32))
    if shape.media_axes:
        batch = batch.replace(shifts_AT=np.zeros((shape.media_axes, T), i32))
    if shape.num_adapters:
        no_adapter = shape.num_adapters
        batch = batch.replace(
            adapters_T=np.full(T, no_adapter, i32), adapters_R=np.full(R, no_adapter, i32)
        )
    return batch
