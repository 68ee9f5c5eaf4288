"""The static parameters of paged attention, and the interface of its implementations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...sharding.device_axes import UNSPLIT, Axis


@dataclass(frozen=True)
class AttentionParams:
    """A layer's attention parameters, the same in every step.

    A token attends to the last `window` positions up to its own; with `chunked`, only to those
    since the last multiple of `window`. It also attends to the `lookahead` positions after its own
    for which its sequence has tokens in the step, and with `spans` to those up to
    `QueryRows.sees_T`, which rises with the rows of a sequence.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    lookahead: int = 0
    soft_cap: float | None = None
    value_dim: int | None = (
        None  # width of the values, if they are the first part of the keys (MLA)
    )
    context: Axis = UNSPLIT  # devices that each hold some of the positions of every page
    split_rows: bool = False  # each device of `context` gets the results of its part of the tokens
    spans: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """Static sizes and types of a call's arrays."""

    tokens: int
    sequences: int
    table_width: int  # pages a sequence
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None
    dtype: str  # of the queries
    page_dtype: str
    num_pages: int
    page_size: int  # positions of a page on this device
    # layout of the pages: "separate", "paired" (each value follows its key) or "latent" (values are
    # part of the keys)
    layout: str
    has_scales: bool  # pages hold quantised values
    has_sinks: bool
    sees_spans: bool = False  # rows see up to `QueryRows.sees_T`

    @classmethod
    def of(cls, q_TNH, pages, rows, params: AttentionParams, sinks_N=None) -> "AttentionShape":
        paired = pages.kv_PSYH is not None
        page = pages.kv_PSYH if paired else pages.k_PSKH
        value_page = page if paired else pages.v_PSKH
        latent = value_page is None
        return cls(
            tokens=q_TNH.shape[0],
            sequences=rows.tables_BM.shape[0],
            table_width=rows.tables_BM.shape[1],
            heads=q_TNH.shape[1],
            kv_heads=page.shape[2] // (2 if paired else 1),
            head_dim=q_TNH.shape[2],
            value_dim=params.value_dim if value_page is None else value_page.shape[3],
            dtype=q_TNH.dtype.name,
            page_dtype=page.dtype.name,
            num_pages=page.shape[0],
            page_size=page.shape[1],
            layout="paired" if paired else "latent" if latent else "separate",
            has_scales=pages.k_scale_PKS is not None,
            has_sinks=sinks_N is not None,
            sees_spans=params.spans and rows.sees_T is not None,
        )


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of paged attention; its module has it as `BACKEND`.

    Args:
        attend: `(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N=None) -> (out_TNH, pages)`.
        limits: Returns why these parameters and shapes are not supported on this machine; None if
            they are.
        chunked: Supports `AttentionParams.chunked`.
        lookahead: Supports `AttentionParams.lookahead`.
        spans: Supports `AttentionParams.spans`.
        context_parallel: Supports `AttentionParams.context` with several devices.
    """

    attend: Callable[..., Any]
    limits: Callable[[AttentionParams, AttentionShape], str | None]
    chunked: bool = False
    lookahead: bool = False
    spans: bool = False
    context_parallel: bool = False

    def unsupported(self, params: AttentionParams, shape: AttentionShape) -> str | None:
        """Why a call is not supported; None if it is."""
        if params.context.size > 1 and not self.context_parallel:
            return f"positions are spread over {params.context.size} devices"
        if params.chunked and not self.chunked:
            return "rows see a chunk of the context each"
        if params.lookahead and not self.lookahead:
            return "rows see positions after their own"
        if shape.sees_spans and not self.spans:
            return "rows see spans of their sequence whole"
        return self.limits(params, shape)

    def __call__(self, q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
        """Call `attend`; raise NotImplementedError with the reason if the call is unsupported."""
        reason = self.unsupported(params, AttentionShape.of(q_TNH, pages, rows, params, sinks_N))
        if reason is not None:
            raise NotImplementedError(reason)
        return self.attend(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N)
