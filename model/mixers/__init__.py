"""A layer's mixers, where rows meet those before them. One file each, by `kind` of the mixer's configuration.

A module has `spec(config, mixer)`, its weights' specs; `reads(weights)`, the weight that its rows meet first; and
`mix(mixer, weights, x_TD, rope, cache, reach, eps, axes) -> (out_TD, cache)`.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..config import Mixer

MIXERS = {
    "attention": ".attention", "latent": ".latent", "delta_net": ".delta_net", "mamba2": ".mamba2",
    "kimi_delta": ".kimi_delta", "short_conv": ".short_conv", "side_by_side": ".side_by_side",
}  # fmt: skip


class Reach(NamedTuple):
    """How a layer's rows reach what is kept of those before them; as arguments of a forward function, of all layers.

    `attend(index, q_TNH, k_TKH, v_TKH, cache, **options) -> (out_TNH, cache)`
    `prepare(index, qkv_TGH, heads, cache) -> (q_TNH, k_TKH, v_TKH, cache)`; without it they are prepared by the mixer
    `recur(index, inputs, run, cache) -> (out_T, cache)`, where `run(inputs, states, rows) -> (out_T, states)` is called
    with a tree of the layer's rows, and what a mixer keeps of fixed size.
    """

    attend: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    recur: Callable[..., Any] | None = None

    def of(self, index: int) -> "Reach":
        """That of one layer."""
        return Reach(*(None if each is None else partial(each, index) for each in self))


def module_of(mixer: Mixer) -> Any:
    return importlib.import_module(MIXERS[mixer.kind], __name__)
