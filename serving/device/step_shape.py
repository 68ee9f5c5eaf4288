"""The shape of a step: what its program is compiled for, and what the scheduler may put into it.

Without JAX.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..api.params import MAX_LOGPROBS


class Size(NamedTuple):
    """A size that is compiled before the first request: tokens, sequences, and tokens whose logits
    are computed.
    """

    rows: int
    seqs: int
    samples: int


@dataclass(frozen=True)
class StepShape:
    """All that a step is compiled for beside the model. Programs take it whole.

    The shape of an engine has the most that a step of a replica may hold as its `size`; `at(size)`
    is the shape of a compiled step. An option that changes no program has no field here, since
    programs are cached by their shape.
    """

    size: Size
    max_seqs: int  # slots of a replica
    num_logprobs: int = MAX_LOGPROBS  # listed at a position
    max_drafts: int = 0  # draft tokens of a sequence, one after the other
    needs_draft_prefill: bool = False  # it must compute the tokens before those that it drafts
    whole_prompts: bool = False  # an encoder's: a prompt is computed in one step
    num_adapters: int = 0
    reads_media: bool = False
    media_axes: int = 0  # axes of the rotary embedding; 0: a position is a token's index
    sees_spans: bool = False  # an image's tokens see all of it
    num_groups: int = 1  # of layers that share a page table
    page_size: int = 16
    table_width: int = 1  # pages of a sequence
    num_replicas: int = 1

    @classmethod
    def largest(
        cls, max_seqs: int, max_tokens: int, max_samples: int, **others: Any
    ) -> "StepShape":
        """The shape of an engine."""
        return cls(Size(max_tokens, max_seqs, max_samples), max_seqs, **others)

    def with_cache(
        self, num_groups: int, page_size: int, max_len: int, num_replicas: int = 1
    ) -> "StepShape":
        """The same with a cache for sequences of up to `max_len` tokens."""
        width = -(-max_len // page_size)
        return replace(
            self,
            num_groups=num_groups,
            page_size=page_size,
            table_width=width,
            num_replicas=num_replicas,
        )

    def at(self, size: Size) -> "StepShape":
        return replace(self, size=size)

    @property
    def max_tokens(self) -> int:
        return self.size.rows

    @property
    def max_samples(self) -> int:
        """Tokens whose logits are computed."""
        return self.size.samples


def sizes(shape: StepShape, platform: str = "cpu") -> tuple[Size, ...]:
    """The sizes that are compiled for an engine, the smallest first.

    Decode sizes by factors of four, and two for steps that carry prompts; with drafts, more for
    those that verify. An encoder never decodes: all its steps carry prompts.

    On a GPU decode sizes are by factors of two, and those for prompts by factors of four. Its
    products take 16 rows at least: with fewer, each would wait for a launch that pads its rows.
    """
    max_seqs = shape.max_seqs
    max_rows = shape.max_tokens
    max_drafts = shape.max_drafts
    gpu = platform == "gpu"
    fewest = 16 if gpu else 4
    decode = []
    seqs = fewest
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
        pairs = [
            (min(count * (1 + max_drafts), max_rows), seqs)
            for count, seqs in counts.items()
            if count <= seqs
        ]
        pairs += [
            (2 * size.seqs, size.seqs)
            for size in decode
            if max_drafts > 1 and 2 * size.seqs <= max_rows
        ]
        if gpu:  # blocks of its products: each would pad its rows and cut its results
            pairs = [
                (min(count + -count % (128 if count > 64 else 16), max_rows), seqs)
                for count, seqs in pairs
            ]
        verify = {Size(count, seqs, count) for count, seqs in pairs if count != seqs}
    # More rows than sequences: as many would mean one row from each.
    mixed = {Size(max(count, top + 1), top, max(top, 16)) for count in prompts}
    return tuple(sorted(mixed if shape.whole_prompts else {*decode, *verify, *mixed}))


def choose(options: Iterable[Size], rows: int, seqs: int, samples: int, decodes: bool) -> Size:
    """The smallest size that holds a step; a size with as many rows as sequences takes one row from
    each.
    """
    for size in options:
        holds = size.rows >= rows and size.seqs >= seqs and size.samples >= samples
        if holds and (decodes or size.rows != size.seqs):
            return size
    raise ValueError(f"no step size holds {rows} rows of {seqs} sequences with {samples} samples")
