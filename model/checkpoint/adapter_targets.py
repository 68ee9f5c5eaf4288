"""Which weights take adapters of low rank, and the stacks beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.adapter import Adapted
from ...ops.quant.stack import one_of
from ...sharding import local_shards
from ...sharding.mesh import Mesh, element_orders, sharding, take_elements
from ...sharding.spec import ArraySpec, Runs
from ..config import ModelConfig, ModelError
from ..families.common import Source, SourceTensor
from ..weights import LayerWeights, ModelWeights, MoeWeights, dense_specs
from .expert_stacks import of_each
from .loader import sources_of

EXPERTS = "experts"  # the name of them all, as of a module


class Part(NamedTuple):
    """A matrix of a checkpoint, within the weight that it is loaded into."""

    shape: tuple[int, int]  # in the checkpoint: [outputs, inputs]
    source: SourceTensor
    number: int  # among those of its weight
    first: int  # of its outputs among those of the weight
    last: int
    which: tuple[int, ...] = ()  # where the weight is a stack of matrices: (the one,)

    def orders(self, into: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Which input, and which output, of the checkpoint's stands in each place of the weight."""
        outputs, inputs = self.shape
        each_out = np.broadcast_to(np.arange(outputs)[:, None], self.shape)
        each_in = np.broadcast_to(np.arange(inputs)[None], self.shape)
        size = math.prod(into)
        out_O, in_I = self.source.turn(each_out).reshape(size, -1)[0], self.source.turn(each_in).reshape(size, -1)[:, 0]
        for order in (out_O, in_I):
            if order.dtype.kind != "i" or not np.array_equal(np.sort(order), np.arange(len(order))):
                raise ModelError(f"{self.source.name} is changed while it is loaded, and takes no adapter")
        return in_I, out_O


@dataclass(frozen=True)
class Target:
    """A weight [*stack, *into, *out] that takes adapters."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    axes: tuple[str | Runs | None, ...]  # of all
    parts: tuple[Part, ...]  # of a stack those of all its matrices, one after the other
    is_head: bool = False
    stack: tuple[int, ...] = ()  # (how many matrices,), such as experts

    @property
    def inputs(self) -> int:
        return math.prod(self.into)

    @property
    def outputs(self) -> int:
        return math.prod(self.out)

    @property
    def modules(self) -> set[str]:
        """The names by which it is chosen: those of its modules, or of what holds all experts."""
        if self.stack:
            return {EXPERTS}
        return {part.source.name.removesuffix(".weight").rpartition(".")[2] for part in self.parts}

    @property
    def each(self) -> tuple[Part, ...]:
        """The parts of one matrix."""
        return self.parts[: len(self.parts) // math.prod(self.stack)]

    def specs(self, dtype: Any, rank: int, slots: tuple[int, ...] = ()) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """(down, up, longer) of an adapter, or of stacks of so many, split as the weight beside which they lie."""
        s, lead = len(self.stack), (*slots, *self.stack)
        own, axes = (*[None] * len(slots), *self.axes[:s]), self.axes[s:]
        into, out = axes[: len(self.into)], axes[len(self.into) :]
        return (
            ArraySpec((*lead, *self.into, len(self.each) * rank), dtype, (*own, *into, None)),
            ArraySpec((*lead, rank, *self.out), dtype, (*own, None, *out)),
            ArraySpec((*lead, *self.out), np.float32, (*own, *out)),
        )

    def ranges(self, mesh: Mesh | None) -> tuple[tuple[int, int], ...]:
        """Which outputs, of those that a device has, are of which part."""
        if mesh is None:
            return tuple((part.first, part.last) for part in self.each)
        spec = ArraySpec(self.out, np.int64, self.axes[-len(self.out) :])
        sizes = [part.last - part.first for part in self.each]
        numbers = np.repeat(np.arange(len(sizes)), sizes).reshape(self.out)
        for at, order in enumerate(element_orders(spec, mesh)):
            numbers = numbers if order is None else take_elements(numbers, order, at)
        cuts = sharding(spec, mesh).devices_indices_map(numbers.shape).values()
        first, *others = [numbers[cut].reshape(-1) for cut in cuts]
        if np.any(np.diff(first) < 0) or not all(np.array_equal(first, other) for other in others):
            name = self.parts[0].source.name
            raise ModelError(f"enable_lora is set, and the devices have unequal parts of {name}: use fewer")
        ends = np.searchsorted(first, np.arange(len(sizes)), side="right").tolist()
        return tuple(zip([0, *ends], ends, strict=False))


def takes_adapters(spec: Any) -> bool:
    """Whether a weight, as it is before quantisation, is the matrix of a plain product."""
    return isinstance(spec, ArraySpec) and bool(spec.inputs) and not spec.stacked and spec.size > spec.shape[0]


def target_of(spec: ArraySpec, source: Source) -> Target | None:
    """The weight as adapters see it; None where it takes none."""
    k = len(spec.inputs)
    if not takes_adapters(spec) or spec.inputs != tuple(range(k)) or source.whole:
        return None
    into, out = spec.shape[:k], spec.shape[k:]
    place, parts = np.arange(math.prod(out)).reshape(out), []
    for number, part in enumerate(source.parts):
        at = part.at if isinstance(part.at, tuple) else (part.at,)
        own = place[at[k:]].reshape(-1)
        if len(part.shape) != 2 or own.size != part.shape[0] or np.any(np.diff(own) != 1):
            return None
        parts.append(Part((part.shape[0], part.shape[1]), part, number, int(own[0]), int(own[-1]) + 1))
    whole = [(part.first, part.last) for part in parts]
    if [first for first, _ in whole] != [0, *(last for _, last in whole[:-1])] or whole[-1][1] != place.size:
        return None
    return Target(into, out, spec.axes, tuple(parts))


def target_of_stack(spec: ArraySpec, source: Source) -> Target | None:
    """The same for a stack, where a checkpoint may hold each of its matrices by itself: adapters name them so."""
    if not spec.stacked or source.parts[0].at == ():
        return None
    each = [target_of(one_of(spec), Source(parts)) for parts, _ in of_each(spec.shape[0], source.parts, {})]
    found = [target for target in each if target is not None]
    if len(found) < len(each):
        return None
    parts = tuple(part._replace(which=(which,)) for which, target in enumerate(found) for part in target.parts)
    return replace(found[0], axes=spec.axes, parts=parts, stack=spec.shape[:1])


def every_target(config: ModelConfig) -> ModelWeights:
    """A tree like the weights, with a `Target` or None in place of each."""

    def targets(spec, source) -> Any:
        return jax.tree.map(target_of, spec, source)

    def of_mixture(spec, source) -> MoeWeights:
        router = targets(spec.router_DE, source.router_DE)
        stacks = (spec.up_EDGF, source.up_EDGF), (spec.down_EFD, source.down_EFD)
        return MoeWeights(router, *(jax.tree.map(target_of_stack, *both) for both in stacks))

    layers = zip(dense_specs(config).layers, sources_of(config).layers, strict=True)
    found = ModelWeights(
        embed_VD=None,
        layers=tuple(
            LayerWeights(
                attention=targets(spec.attention, source.attention),
                mlp=targets(spec.mlp, source.mlp),
                moe=spec.moe and of_mixture(spec.moe, source.moe),
            )
            for spec, source in layers
        ),
        final_norm_D=None,
    )
    return found.replace(**{head_name(config): head_target(config)}) if config.writes else found


def target_tree(config: ModelConfig, modules: Sequence[str] = ()) -> ModelWeights:
    """The targets of these names; without any all but experts and their routers."""
    every = every_target(config)
    if not modules:
        return every.replace(layers=tuple(layer.replace(moe=None) for layer in every.layers))
    known = {name for target in jax.tree.leaves(every) for name in target.modules}
    for name in modules:
        if name not in known:
            raise ModelError(
                f"lora_target_modules names {name!r}; of {config.family} models these take adapters: "
                f"{', '.join(sorted(known))}"
            )
    return jax.tree.map(lambda target: target if target.modules & {*modules} else None, every)


def head_name(config: ModelConfig) -> str:
    """The field of the weights that holds the head."""
    return "embed_VD" if config.tied else "head_VD"


def head_target(config: ModelConfig) -> Target | None:
    """The head, as a checkpoint names it whose head is not the embedding: that is the name that adapters have."""
    head_VD = dense_specs(replace(config, tied=False)).head_VD
    (part,) = sources_of(replace(config, tied=False)).head_VD.parts
    spec = replace(head_VD, shape=head_VD.shape[::-1], axes=head_VD.axes[::-1], inputs=(0,))
    found = target_of(spec, Source((replace(part, turn=lambda x: part.turn(x).T),)))
    return found and replace(found, is_head=True)


def targets_of(config: ModelConfig, modules: Sequence[str] = ()) -> tuple[Target, ...]:
    """The weights that take adapters, in the order of the tree."""
    return tuple(jax.tree.leaves(target_tree(config, modules)))


def with_adapters(
    weights: ModelWeights,
    config: ModelConfig,
    slots: int,
    rank: int,
    mesh: Mesh | None = None,
    modules: Sequence[str] = (),
) -> ModelWeights:
    """The weights with stacks for so many adapters of at most that rank beside them."""

    def zeros(spec: ArraySpec) -> Any:
        if mesh is None:
            return jnp.zeros(spec.shape, spec.dtype)
        return jnp.zeros(local_shards.sharded_shape(spec, mesh), spec.dtype, device=sharding(spec, mesh))

    def add(target: Target | None, weight) -> Any:
        if target is None:
            return weight
        stacks = map(zeros, target.specs(jnp.dtype(config.dtype), rank, (slots,)))
        return Adapted(weight, *stacks, parts=target.ranges(mesh))

    def both(targets, own):
        return jax.tree.map(add, targets, own, is_leaf=lambda node: node is None or isinstance(node, Target))

    found, head = target_tree(config, modules), head_name(config)
    layers = [
        own.replace(**{name: both(getattr(targets, name), getattr(own, name)) for name in ("attention", "mlp", "moe")})
        for targets, own in zip(found.layers, weights.layers, strict=True)
    ]
    return weights.replace(layers=tuple(layers), **{head: add(getattr(found, head), getattr(weights, head))})
