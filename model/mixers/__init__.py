"""Token mixers: attention and recurrent layers. One file each, by `kind` of the mixer's
configuration.

A module has `spec(config, mixer)`, the specs of its weights; `reads(weights)`, the weight that
multiplies its input; and `mix(mixer, weights, x_TD, rope, cache, hooks, eps, axes) -> (out_TD,
cache)`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..config import Mixer

MIXERS = {
    "attention": ".attention", "latent": ".latent", "delta_net": ".delta_net", "mamba2": ".mamba2",
    "kimi_delta": ".kimi_delta", "short_conv": ".short_conv", "side_by_side": ".side_by_side",
}  # fmt: skip


@dataclass(frozen=True)
class LayerHooks:
    """What the caller of a forward function does within its layers: caches, counters, and weights
    that lie elsewhere.

    `index` is the layer's number in the model. `cache` is the caller's own: it passes from hook to
    hook, and comes back from the forward function. In a mixer the first three are those of its
    layer, without the index (`of_layer`).

    Attributes:
        attend: `(index, q_TNH, k_TKH, v_TKH, cache, params, sinks_N=None, picks=None) -> (out_TNH,
            cache)`, with the layer's `AttentionParams`. Appends keys and values to the cache, if
            `prepare` has not, and attends; the only place where tokens of a sequence meet.
        prepare: `(index, qkv_TGH, heads, cache) -> (q_TNH, k_TKH, v_TKH, cache)`. Normalises and
            rotates the heads; it may append keys and values too, and gives None for them then.
            None: the mixer prepares the heads.
        recur: `(index, inputs, run, cache) -> (out_T, cache)`. Calls `run(inputs, states, rows) ->
            (out_T, states)` with the layer's recurrent states. Models with such layers need it.
        record_experts: `(index, experts_TX, cache) -> cache`. Gets the experts that each token
            chose, one past the last in padding.
        fetch_weights: `(number, weights, x) -> (weights, x)`. Brings a layer's weights to the
            device, one layer ahead; `number` counts the layers of this call.
        observe: `(index, x_TD) -> None`. Gets the output of each layer.
        add_after: `(index) -> x_TD or None`. What is added to the output of a layer.
        share_trace: `(run) -> run`. May trace equal layers once; `run(index, weights, rows,
            per_layer_TA, cache)` is what a layer does.
    """

    attend: Callable[..., Any]
    prepare: Callable[..., Any] | None = None
    recur: Callable[..., Any] | None = None
    record_experts: Callable[..., Any] | None = None
    fetch_weights: Callable[..., Any] | None = None
    observe: Callable[[int, Any], None] | None = None
    add_after: Callable[[int], Any] | None = None
    share_trace: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None

    def of_layer(self, index: int) -> "LayerHooks":
        """Those that the mixer of a layer calls."""
        return LayerHooks(
            partial(self.attend, index),
            None if self.prepare is None else partial(self.prepare, index),
            None if self.recur is None else partial(self.recur, index),
        )


def module_of(mixer: Mixer) -> Any:
    return importlib.import_module(MIXERS[mixer.kind], __name__)
