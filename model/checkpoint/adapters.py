"""Adapters of low rank: which weights take them, and what a PEFT folder adds to each."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from .folder import ADAPTER, read_json
from .loader import canonical, inner, module_of, sources_of
from .safetensors import Tensor, read_header

FILE = "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256)  # that stacks have
MAX_RANK = 1 << 12  # that a folder may say
EXPERTS = "experts"  # the name of them all, as of a module
NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
HEAD = re.compile(r"(?:base_model\.model\.)?((?:.+\.)?lm_head)\.base_layer\.weight")  # the model's own, saved beside it
REFUSED = {  # keys of adapter_config.json that change what is computed, and why they are not served
    "use_dora": "it scales the weights' columns too; merge it into the model",
    "modules_to_save": "it brings whole weights of its own; merge it into the model",
    "layer_replication": "it repeats layers",
    "trainable_token_indices": "it brings rows of the embedding; merge it into the model",
    "target_parameters": "it adapts stacked experts; merge it into the model",
    "lora_bias": "its matrices have biases; merge it into the model",
    "fan_in_fan_out": "its matrices are transposed", "use_qalora": "it pools its inputs",
    "alora_invocation_tokens": "it begins within a prompt",
}  # fmt: skip
REBASED = ("pissa", "olora", "corda")  # ways to begin that change the base's weights


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

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(down, up) of an adapter."""
        return (*self.stack, *self.into, len(self.each) * rank), (*self.stack, rank, *self.out)

    def specs(self, dtype: Any, rank: int, slots: tuple[int, ...] = ()) -> tuple[ArraySpec, ArraySpec]:
        """(down, up) of an adapter, or of stacks of so many. Both are split as the weight beside which they lie."""
        lead, first = (*[None] * len(slots), *self.axes[: len(self.stack)]), len(self.stack)
        into, out = self.axes[first:][: len(self.into)], self.axes[first:][len(self.into) :]
        down, up = self.shapes(rank)
        return (
            ArraySpec((*slots, *down), dtype, (*lead, *into, None)),
            ArraySpec((*slots, *up), dtype, (*lead, None, *out)),
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


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter adds to each weight that takes one, in their order, on the host."""

    key: str  # a digest of its files: what is computed with it is shared with none that differs
    has_head: bool  # whether it adapts the head
    targets: tuple[Target, ...]  # the weights
    matrices: list[tuple[np.ndarray, np.ndarray]]  # (down [*stack, *into, parts * rank], up [*stack, rank, *out])


def bucket_of(rank: int) -> int:
    """The rank of the stacks for adapters of at most this rank."""
    return next(each for each in RANKS if each >= rank)


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
        down, up = map(zeros, target.specs(jnp.dtype(config.dtype), rank, (slots,)))
        return Adapted(weight, down, up, parts=target.ranges(mesh))

    def both(targets, own):
        return jax.tree.map(add, targets, own, is_leaf=lambda node: node is None or isinstance(node, Target))

    found, head = target_tree(config, modules), head_name(config)
    layers = [
        own.replace(**{name: both(getattr(targets, name), getattr(own, name)) for name in ("attention", "mlp", "moe")})
        for targets, own in zip(found.layers, weights.layers, strict=True)
    ]
    return weights.replace(layers=tuple(layers), **{head: add(getattr(found, head), getattr(weights, head))})


def spread(adapter: Adapter, mesh: Mesh) -> list[tuple[Any, Any]]:
    """An adapter's matrices over the devices, as the stacks lie."""

    def place(matrix: np.ndarray, spec: ArraySpec) -> jax.Array:
        return local_shards.shard(matrix, spec, mesh, sharding(spec, mesh))

    both = zip(adapter.targets, adapter.matrices, strict=True)
    specs = [target.specs(up.dtype, up.shape[len(target.stack)]) for target, (_, up) in both]
    return jax.tree.map(place, adapter.matrices, specs)


def read_adapter(folder: Path, config: ModelConfig, targets: tuple[Target, ...], most: int) -> Adapter:
    """The adapter of a PEFT folder, for stacks of `bucket_of(most)`; what it holds that is not served is named."""
    about, file = read_about(folder), folder / FILE
    if not file.is_file():
        raise ModelError(f"{folder} holds no {FILE}; adapters are read from safetensors alone")
    places = {part.source.name: (index, part) for index, target in enumerate(targets) for part in target.parts}
    rank, dtype, family = bucket_of(most), np.dtype(jnp.dtype(config.dtype)), module_of(config)
    matrices: list[Any] = [None] * len(targets)
    orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # the same for all matrices of a stack
    for module, (down, up) in pairs_of(file).items():
        name = canonical(family, f"{module}.weight")
        found = places.get(name) or places.get(inner(name))
        if found is None:
            raise ModelError(f"{file} adapts {module!r}, which takes no adapter here: {why_not(config, name)}")
        index, part = found
        own, target = check_shapes(file, down, up, part, about, module, most), targets[index]
        if matrices[index] is None:
            matrices[index] = tuple(np.zeros(shape, dtype) for shape in flat(target, rank))
        if (index, part.number) not in orders:
            orders[index, part.number] = part.orders(target.into)
        in_I, out_O = orders[index, part.number]
        down_RI, up_OR = (tensor.read().astype(np.float32) for tensor in (down, up))
        if not (np.isfinite(down_RI).all() and np.isfinite(up_OR).all()):
            raise ModelError(f"{file}: the matrices of {module!r} have values that are not finite")
        down_IR, up_RO = (matrix[part.which] for matrix in matrices[index])
        down_IR[:, part.number * rank :][:, :own] = down_RI.T[in_I]
        up_RO[:own, part.first : part.last] = (up_OR * np.float32(about.scale(module, own))).T[:, out_O]
    empty = {shape: np.zeros(shape, dtype) for target in targets for shape in flat(target, rank)}
    shaped = [
        tuple(
            (empty[wide] if own is None else own[half]).reshape(shape)
            for half, (wide, shape) in enumerate(zip(flat(target, rank), target.shapes(rank), strict=True))
        )
        for target, own in zip(targets, matrices, strict=True)
    ]
    has_head = any(target.is_head and own is not None for target, own in zip(targets, matrices, strict=True))
    return Adapter(digest_of(folder), has_head, targets, shaped)


def flat(target: Target, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of (down, up) with all inputs, and all outputs, along one axis."""
    return (*target.stack, target.inputs, len(target.each) * rank), (*target.stack, rank, target.outputs)


def why_not(config: ModelConfig, name: str) -> str:
    """What to do about an adapter of a tensor that has no stack."""
    for target in jax.tree.leaves(every_target(config)):
        if {part.source.name for part in target.parts} & {name, inner(name)}:
            return f"name it in lora_target_modules, as {' or '.join(sorted(target.modules))}"
    return f"of {config.family} models neither the embedding nor fused experts do; merge it into the model's weights"


@dataclass(frozen=True)
class About:
    """What adapter_config.json says of ranks and scales."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # of modules whose names end so
    alphas: Mapping[str, float]
    by_root: bool

    def rank_of(self, module: str) -> int:
        return int(matching(self.ranks, module, self.rank))

    def scale(self, module: str, rank: int) -> float:
        alpha = matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


def matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name, or regular expression, that a module's name ends with."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def read_about(folder: Path) -> About:
    """The configuration of an adapter, if it is of a kind that is served."""
    if not (folder / ADAPTER).is_file():
        raise ModelError(f"{folder} holds no {ADAPTER}: it must be a folder that PEFT has written")
    given, where = read_json(folder / ADAPTER), folder / ADAPTER
    if (kind := given.get("peft_type")) != "LORA":
        raise ModelError(f"{where}: peft_type = {kind!r:.80}; it must be 'LORA'")
    for key, why in REFUSED.items():
        if given.get(key):
            raise ModelError(f"{where}: {key} = {given[key]!r:.80} is not served: {why}")
    if (bias := given.get("bias", "none")) != "none":
        raise ModelError(f"{where}: bias = {bias!r:.80}; it must be 'none': biases are the model's own")
    if str(begun := given.get("init_lora_weights")).lower().startswith(REBASED):
        raise ModelError(
            f"{where}: init_lora_weights = {begun!r:.80} changes the model's weights too; save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    ranks, alphas = (pattern_of(where, given.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    rank, alpha = checked_rank(where, "r", given.get("r")), checked_number(where, "lora_alpha", given.get("lora_alpha"))
    for key, value in ranks.items():
        checked_rank(where, f"rank_pattern[{key}]", value)
    for key, value in alphas.items():
        checked_number(where, f"alpha_pattern[{key}]", value)
    if not isinstance(by_root := given.get("use_rslora") or False, bool):
        raise ModelError(f"{where}: use_rslora = {by_root!r:.80}; it must be true or false")
    return About(rank, alpha, ranks, alphas, by_root)


def checked_rank(where: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise ModelError(f"{where}: {name} = {value!r:.80}; it must be a whole number from 1 to {MAX_RANK}")
    return value


def checked_number(where: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{where}: {name} = {value!r:.80}; it must be a number")
    return value


def pattern_of(where: Path, patterns: Any) -> dict[str, Any]:
    """A table by modules, whose names may be regular expressions of bounded work."""
    if not isinstance(patterns, dict):
        raise ModelError(f"{where}: a pattern is {patterns!r:.80}; it must map names of modules to numbers")
    for name in patterns:
        if len(name) > 256 or not re.fullmatch(r"\^?[\w.\\|]+\$?", name):
            why = "it must be the name of a module, or its end"
            raise ModelError(f"{where}: the pattern {name!r:.80} is not read; {why}")
    return patterns


def pairs_of(file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """(down, up) of every module that an adapter's file adapts; a tensor that is neither is named."""
    halves: dict[str, dict[str, Tensor]] = {}
    others: list[str] = []
    for name, tensor in read_header(file).items():
        if found := NAME.fullmatch(name):
            halves.setdefault(found[1], {})[found[2]] = tensor
        else:
            others.append(name)
    for name in others:
        if not (found := HEAD.fullmatch(name)) or found[1] not in halves:
            raise ModelError(
                f"{file} holds the tensor {name!r}, which is no lora_A or lora_B of a linear layer; merge the adapter "
                "into the model's weights"
            )
    for module, both in halves.items():
        if len(both) < 2:
            raise ModelError(f"{file} lacks lora_{'B' if 'A' in both else 'A'} of {module!r}")
    if not halves:
        raise ModelError(f"{file} holds no tensors")
    return {module: (both["A"], both["B"]) for module, both in halves.items()}


def check_shapes(file: Path, down: Tensor, up: Tensor, part: Part, about: About, module: str, most: int) -> int:
    """The rank of a module's matrices, if they fit the weight, the configuration and the stacks."""
    (outputs, inputs), rank = part.shape, about.rank_of(module)
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ModelError(
            f"{file}: lora_A and lora_B of {module!r} have shapes {list(down.shape)} and {list(up.shape)}; the model "
            f"and {ADAPTER} want {[rank, inputs]} and {[outputs, rank]}"
        )
    if rank > most:
        raise ModelError(f"{file}: {module!r} has rank {rank}; max_lora_rank is {most}")
    return rank


def digest_of(folder: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in (ADAPTER, FILE):
        with (folder / name).open("rb") as file:
            while data := file.read(1 << 20):
                found.update(data)
    return found.hexdigest()
