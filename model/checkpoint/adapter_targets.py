"""The weights that LoRA adapters can target, and the stacks of adapter matrices beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.adapter import Adapted
from ...ops.quant.stack import matrix_spec
from ...sharding import local_shards
from ...sharding.mesh import Mesh, shard_layouts, sharding, take_elements
from ...sharding.spec import ArraySpec, Interleaved
from ..config import ModelConfig, ModelError
from ..families.common import Source, SourceTensor
from ..weights import LayerWeights, ModelWeights, MoeWeights, dense_specs
from .expert_stacks import split_by_expert
from .loader import weight_sources

EXPERTS = "experts"  # the module name that selects all experts of a layer


class AdaptedMatrix(NamedTuple):
    """A matrix of the checkpoint and the outputs that it fills in the weight it is loaded into."""

    shape: tuple[int, int]  # in the checkpoint: [outputs, inputs]
    source: SourceTensor
    number: int  # position among the matrices of its weight
    first: int  # its first output in the weight
    last: int  # one past its last output in the weight
    stack_index: tuple[int, ...] = ()  # its index in the stack; empty if the weight is not stacked

    def permutations(self, into: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each input and each output of the weight, its index in the checkpoint."""
        outputs, inputs = self.shape
        output_indices = np.broadcast_to(np.arange(outputs)[:, None], self.shape)
        input_indices = np.broadcast_to(np.arange(inputs)[None], self.shape)
        size = math.prod(into)
        out_O = self.source.transform(output_indices).reshape(size, -1)[0]
        in_I = self.source.transform(input_indices).reshape(size, -1)[:, 0]
        for order in (out_O, in_I):
            if order.dtype.kind != "i" or not np.array_equal(np.sort(order), np.arange(len(order))):
                raise ModelError(
                    f"{self.source.name} is changed while it is loaded, and cannot be adapted"
                )
        return in_I, out_O


@dataclass(frozen=True)
class AdapterTarget:
    """A weight of shape [*stack, *into, *out] that adapters can target."""

    into: tuple[int, ...]
    out: tuple[int, ...]
    axes: tuple[str | Interleaved | None, ...]  # logical axes of the whole shape
    matrices: tuple[AdaptedMatrix, ...]  # of a stack: the matrices of all its elements, in order
    is_head: bool = False
    stack: tuple[int, ...] = ()  # (number of stacked matrices,), such as (num_experts,)

    @property
    def inputs(self) -> int:
        return math.prod(self.into)

    @property
    def outputs(self) -> int:
        return math.prod(self.out)

    @property
    def modules(self) -> set[str]:
        """The module names that select it: the last part of each tensor's name, or EXPERTS."""
        if self.stack:
            return {EXPERTS}
        return {
            matrix.source.name.removesuffix(".weight").rpartition(".")[2]
            for matrix in self.matrices
        }

    @property
    def element_matrices(self) -> tuple[AdaptedMatrix, ...]:
        """The checkpoint matrices that make up one element of the stack."""
        return self.matrices[: len(self.matrices) // math.prod(self.stack)]

    def specs(
        self, dtype: Any, rank: int, slots: tuple[int, ...] = ()
    ) -> tuple[ArraySpec, ArraySpec, ArraySpec]:
        """Specs of (down, up, dora_gain) of one adapter or of `slots`, sharded like the weight."""
        s = len(self.stack)
        lead = (*slots, *self.stack)
        stack_axes = (*[None] * len(slots), *self.axes[:s])
        axes = self.axes[s:]
        into = axes[: len(self.into)]
        out = axes[len(self.into) :]
        return (
            ArraySpec(
                (*lead, *self.into, len(self.element_matrices) * rank),
                dtype,
                (*stack_axes, *into, None),
            ),
            ArraySpec((*lead, rank, *self.out), dtype, (*stack_axes, None, *out)),
            ArraySpec((*lead, *self.out), np.float32, (*stack_axes, *out)),
        )

    def ranges(self, mesh: Mesh | None) -> tuple[tuple[int, int], ...]:
        """The range of a device's outputs that each checkpoint matrix fills."""
        if mesh is None:
            return tuple((matrix.first, matrix.last) for matrix in self.element_matrices)
        spec = ArraySpec(self.out, np.int64, self.axes[-len(self.out) :])
        sizes = [matrix.last - matrix.first for matrix in self.element_matrices]
        numbers = np.repeat(np.arange(len(sizes)), sizes).reshape(self.out)
        for at, order in enumerate(shard_layouts(spec, mesh)):
            numbers = numbers if order is None else take_elements(numbers, order, at)
        cuts = sharding(spec, mesh).devices_indices_map(numbers.shape).values()
        first, *other_devices = [numbers[cut].reshape(-1) for cut in cuts]
        if np.any(np.diff(first) < 0) or not all(
            np.array_equal(first, numbers_on_device) for numbers_on_device in other_devices
        ):
            name = self.matrices[0].source.name
            raise ModelError(
                f"enable_lora is set, and the devices have unequal parts of {name}: use fewer"
            )
        range_ends = np.searchsorted(first, np.arange(len(sizes)), side="right").tolist()
        return tuple(zip([0, *range_ends], range_ends, strict=False))


def takes_adapters(spec: Any) -> bool:
    """Whether a weight, described before quantisation, is multiplied as one plain matrix."""
    return (
        isinstance(spec, ArraySpec)
        and bool(spec.inputs)
        and not spec.stacked
        and spec.size > spec.shape[0]
    )


def make_target(spec: ArraySpec, source: Source) -> AdapterTarget | None:
    """The adapter target for a weight; None if adapters cannot target it."""
    k = len(spec.inputs)
    if not takes_adapters(spec) or spec.inputs != tuple(range(k)) or source.whole:
        return None
    into = spec.shape[:k]
    out = spec.shape[k:]
    place = np.arange(math.prod(out)).reshape(out)
    matrices = []
    for number, source_tensor in enumerate(source.parts):
        at = source_tensor.at if isinstance(source_tensor.at, tuple) else (source_tensor.at,)
        outputs = place[at[k:]].reshape(-1)
        if (
            len(source_tensor.shape) != 2
            or outputs.size != source_tensor.shape[0]
            or np.any(np.diff(outputs) != 1)
        ):
            return None
        matrices.append(
            AdaptedMatrix(
                (source_tensor.shape[0], source_tensor.shape[1]),
                source_tensor,
                number,
                int(outputs[0]),
                int(outputs[-1]) + 1,
            )
        )
    ranges = [(source_tensor.first, source_tensor.last) for source_tensor in matrices]
    if [first for first, _ in ranges] != [0, *(last for _, last in ranges[:-1])] or ranges[-1][
        1
    ] != place.size:
        return None
    return AdapterTarget(into, out, spec.axes, tuple(matrices))


def make_stack_target(spec: ArraySpec, source: Source) -> AdapterTarget | None:
    """The adapter target for stacked experts; None if the checkpoint holds them in one tensor."""
    if not spec.stacked or source.parts[0].at == ():
        return None
    element_targets = [
        make_target(matrix_spec(spec), Source(sources))
        for sources, _ in split_by_expert(spec.shape[0], source.parts, {})
    ]
    targets = [target for target in element_targets if target is not None]
    if len(targets) < len(element_targets):
        return None
    matrices = tuple(
        matrix._replace(stack_index=(index,))
        for index, target in enumerate(targets)
        for matrix in target.matrices
    )
    return replace(targets[0], axes=spec.axes, matrices=matrices, stack=spec.shape[:1])


def all_targets(config: ModelConfig) -> ModelWeights:
    """A weight tree with a target or None in place of each weight."""

    def targets(spec, source) -> Any:
        return jax.tree.map(make_target, spec, source)

    def of_mixture(spec, source) -> MoeWeights:
        router = targets(spec.router_DE, source.router_DE)
        stacks = (spec.up_EDGF, source.up_EDGF), (spec.down_EFD, source.down_EFD)
        return MoeWeights(
            router,
            *(jax.tree.map(make_stack_target, *spec_and_source) for spec_and_source in stacks),
        )

    layers = zip(dense_specs(config).layers, weight_sources(config).layers, strict=True)
    targets_tree = ModelWeights(
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
    return (
        targets_tree.replace(**{head_field(config): make_head_target(config)})
        if config.writes
        else targets_tree
    )


def select_targets(config: ModelConfig, modules: Sequence[str] = ()) -> ModelWeights:
    """The targets that `modules` select; if empty, all except experts and their routers."""
    candidates = all_targets(config)
    if not modules:
        return candidates.replace(
            layers=tuple(layer.replace(moe=None) for layer in candidates.layers)
        )
    known_modules = {name for target in jax.tree.leaves(candidates) for name in target.modules}
    for name in modules:
        if name not in known_modules:
            raise ModelError(
                f"lora_target_modules names {name!r}; of {config.family} models these take "
                f"adapters: {', '.join(sorted(known_modules))}"
            )
    return jax.tree.map(lambda target: target if target.modules & {*modules} else None, candidates)


def head_field(config: ModelConfig) -> str:
    """The field of `ModelWeights` that holds the language-model head."""
    return "embed_VD" if config.tied else "head_VD"


def make_head_target(config: ModelConfig) -> AdapterTarget | None:
    """The head's target. Adapters name it lm_head even where it is tied to the embedding."""
    head_VD = dense_specs(replace(config, tied=False)).head_VD
    (source_tensor,) = weight_sources(replace(config, tied=False)).head_VD.parts
    spec = replace(head_VD, shape=head_VD.shape[::-1], axes=head_VD.axes[::-1], inputs=(0,))
    target = make_target(
        spec, Source((replace(source_tensor, transform=lambda x: source_tensor.transform(x).T),))
    )
    return target and replace(target, is_head=True)


def list_targets(config: ModelConfig, modules: Sequence[str] = ()) -> tuple[AdapterTarget, ...]:
    """The weights that take adapters, in tree order."""
    return tuple(jax.tree.leaves(select_targets(config, modules)))


def add_adapter_stacks(
    weights: ModelWeights,
    config: ModelConfig,
    slots: int,
    rank: int,
    mesh: Mesh | None = None,
    modules: Sequence[str] = (),
) -> ModelWeights:
    """Add zeroed stacks for `slots` adapters of rank at most `rank` beside the targeted weights."""

    def zeros(spec: ArraySpec) -> Any:
        if mesh is None:
            return jnp.zeros(spec.shape, spec.dtype)
        return jnp.zeros(
            local_shards.sharded_shape(spec, mesh), spec.dtype, device=sharding(spec, mesh)
        )

    def add(target: AdapterTarget | None, weight) -> Any:
        if target is None:
            return weight
        stacks = map(zeros, target.specs(jnp.dtype(config.dtype), rank, (slots,)))
        return Adapted(weight, *stacks, output_ranges=target.ranges(mesh))

    def add_all(targets, weights):
        return jax.tree.map(
            add,
            targets,
            weights,
            is_leaf=lambda node: node is None or isinstance(node, AdapterTarget),
        )

    target_weights = select_targets(config, modules)
    head = head_field(config)
    layers = [
        layer.replace(
            **{
                name: add_all(getattr(targets, name), getattr(layer, name))
                for name in ("attention", "mlp", "moe")
            }
        )
        for targets, layer in zip(target_weights.layers, weights.layers, strict=True)
    ]
    return weights.replace(
        layers=tuple(layers), **{head: add(getattr(target_weights, head), getattr(weights, head))}
    )
