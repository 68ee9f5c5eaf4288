"""A call of paged attention as static values, and the description of one implementation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...sharding.device_axes import UNSPLIT, Axis


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention computes, in every step alike.

    A token attends to the last `window` positions or, with `chunked`, to those of them since the
    last multiple of `window`; and to `lookahead` positions after its own, as far as its sequence
    has tokens in the step.
    """

    scale: float
    window: int | None = None
    chunked: bool = False
    lookahead: int = 0
    soft_cap: float | None = None
    # width of the values where they are the first part of the keys (MLA)
    value_dim: int | None = None
    context: Axis = UNSPLIT  # devices that each hold some of the positions of every page
    # each device of `context` gets the results of its own part of the tokens alone
    split_rows: bool = False


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
    # of the pages: "separate", "paired" (a value right after its key), or "latent" (values within
    # keys)
    layout: str
    has_scales: bool  # pages hold quantised values
    has_sinks: bool

    @classmethod
    def of(cls, q_TNH, pages, rows, params: AttentionParams, sinks_N=None) -> "AttentionShape":
        paired = pages.kv_PSYH is not None
        latent = not paired and pages.v_PSKH is None
        page = pages.kv_PSYH if paired else pages.k_PSKH
        return cls(
            tokens=q_TNH.shape[0],
            sequences=rows.tables_BM.shape[0],
            table_width=rows.tables_BM.shape[1],
            heads=q_TNH.shape[1],
            kv_heads=page.shape[2] // (2 if paired else 1),
            head_dim=q_TNH.shape[2],
            value_dim=params.value_dim
            if latent
            else page.shape[3]
            if paired
            else pages.v_PSKH.shape[3],
            dtype=q_TNH.dtype.name,
            page_dtype=page.dtype.name,
            num_pages=page.shape[0],
            page_size=page.shape[1],
            layout="paired" if paired else "latent" if latent else "separate",
            has_scales=pages.k_scale_PKS is not None,
            has_sinks=sinks_N is not None,
        )


@dataclass(frozen=True)
class AttentionBackend:
    """One implementation of paged attention; its module has it as `BACKEND`.

    Args:
        attend: `(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N=None) -> (out_TNH, pages)`.
        limits: Why it does not serve these parameters and shapes on this machine; None if it does.
        chunked: Whether it serves layers with `AttentionParams.chunked`.
        lookahead: Whether tokens may attend to positions after their own.
        context_parallel: Whether several devices may hold the positions of a page.
    """

    attend: Callable[..., Any]
    limits: Callable[[AttentionParams, AttentionShape], str | None]
    chunked: bool = False
    lookahead: bool = False
    context_parallel: bool = False

    def unsupported(self, params: AttentionParams, shape: AttentionShape) -> str | None:
        """Why it does not serve a call; None if it does."""
        if params.context.size > 1 and not self.context_parallel:
            return f"positions are spread over {params.context.size} devices"
        if params.chunked and not self.chunked:
            return "rows see a chunk of the context each"
        if params.lookahead and not self.lookahead:
            return "rows see positions after their own"
        return self.limits(params, shape)

    def __call__(self, q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
        """`attend`, or NotImplementedError with the reason."""
        reason = self.unsupported(params, AttentionShape.of(q_TNH, pages, rows, params, sinks_N))
        if reason is not None:
            raise NotImplementedError(reason)
        return self.attend(q_TNH, k_TKH, v_TKH, pages, rows, params, sinks_N)
