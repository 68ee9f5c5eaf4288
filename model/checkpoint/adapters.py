"""Adapters of low rank: what a PEFT folder adds to each weight."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import local_shards
from ...sharding.mesh import Mesh, sharding
from ...sharding.spec import ArraySpec
from ..config import ModelConfig, ModelError
from .adapter_targets import Part, Target, every_target
from .folder import ADAPTER, read_json
from .loader import canonical, find_parts, inner, module_of
from .safetensors import Tensor, read_header

FILE = "adapter_model.safetensors"
RANKS = (8, 16, 32, 64, 128, 256)  # that stacks have
MAX_RANK = 1 << 12  # that a folder may say
STRIP = 256  # rows of a weight whose lengths are computed together
NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:(?P<half>A|B)(?:\.default)?\.weight|"
    r"(?P<lengths>magnitude_vector)(?:\.default)?(?:\.weight)?)"
)
HEAD = re.compile(r"(?:base_model\.model\.)?((?:.+\.)?lm_head)\.base_layer\.weight")  # the model's own, saved beside it
REFUSED = {  # keys of adapter_config.json that change what is computed, and why they are not served
    "modules_to_save": "it brings whole weights of its own; merge it into the model",
    "layer_replication": "it repeats layers",
    "trainable_token_indices": "it brings rows of the embedding; merge it into the model",
    "target_parameters": "it adapts experts all in one tensor, not each one's projections; merge it into the model",
    "lora_bias": "its matrices have biases; merge it into the model",
    "fan_in_fan_out": "its matrices are transposed", "use_qalora": "it pools its inputs",
    "alora_invocation_tokens": "it begins within a prompt",
}  # fmt: skip
REBASED = ("pissa", "olora", "corda")  # ways to begin that change the base's weights


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter adds to each weight that takes one, in their order, on the host."""

    key: str  # a digest of its files: what is computed with it is shared with none that differs
    has_head: bool  # whether it adapts the head
    targets: tuple[Target, ...]  # the weights
    matrices: list[tuple[np.ndarray, ...]]  # of each (down, up, longer), see `Adapted`


def bucket_of(rank: int) -> int:
    """The rank of the stacks for adapters of at most this rank."""
    return next(each for each in RANKS if each >= rank)


def spread(adapter: Adapter, mesh: Mesh) -> list[tuple[Any, ...]]:
    """An adapter's matrices over the devices, as the stacks lie."""

    def place(matrix: np.ndarray, spec: ArraySpec) -> jax.Array:
        return local_shards.shard(matrix, spec, mesh, sharding(spec, mesh))

    both = zip(adapter.targets, adapter.matrices, strict=True)
    specs = [target.specs(up.dtype, up.shape[len(target.stack)]) for target, (_, up, _) in both]
    return jax.tree.map(place, adapter.matrices, specs)


def read_adapter(
    folder: Path, config: ModelConfig, targets: tuple[Target, ...], most: int, model: Path | None = None
) -> Adapter:
    """The adapter of a PEFT folder, for stacks of `bucket_of(most)`; what it holds that is not served is named.

    `model`: the folder of the weights that it was made for, which one of DoRA gives lengths.
    """
    file = folder / FILE
    about_bytes, content = read_once(folder)
    about = read_about(folder / ADAPTER, about_bytes)
    places = {part.source.name: (index, part) for index, target in enumerate(targets) for part in target.parts}
    rank, dtype, family = bucket_of(most), np.dtype(jnp.dtype(config.dtype)), module_of(config)
    specs = [target.specs(dtype, rank) for target in targets]
    matrices: list[Any] = [None] * len(targets)
    orders: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # the same for all matrices of a stack
    weights = find_weights(model, config) if about.dora and model is not None else {}
    for module, tensors in tensors_of(file, content, about).items():
        name = canonical(family, f"{module}.weight")
        found = places.get(name) or places.get(inner(name))
        if found is None:
            raise ModelError(f"{file} adapts {module!r}, which takes no adapter here: {why_not(config, name)}")
        index, part = found
        own, target = check_shapes(file, tensors, part, about, module, most), targets[index]
        if matrices[index] is None:
            matrices[index] = zeros(specs[index])
        if (index, part.number) not in orders:
            orders[index, part.number] = part.orders(target.into)
        in_I, out_O = orders[index, part.number]
        down_RI, up_OR, *lengths = (tensor.read().astype(np.float32) for tensor in tensors)
        up_OR *= np.float32(about.scale(module, own))
        longer_O = np.zeros(len(up_OR), np.float32)
        if lengths:
            if (weight := weights.get(part.source.name)) is None:
                raise ModelError(
                    f"{file}: use_dora is set, and the model's files hold no {part.source.name!r} by itself, to whose "
                    "rows it gives lengths; merge it into the model's weights"
                )
            with np.errstate(all="ignore"):  # what is not finite is refused below
                times_O = lengths[0] / row_lengths(weight.read(), down_RI, up_OR)
                up_OR, longer_O = up_OR * times_O[:, None], times_O - 1
        if not (np.isfinite(down_RI).all() and np.isfinite(up_OR).all()):
            raise ModelError(f"{file}: the matrices of {module!r} have values that are not finite")
        down, up, longer = (each[part.which] for each in matrices[index])
        down.reshape(target.inputs, -1)[:, part.number * rank :][:, :own] = down_RI.T[in_I]
        up.reshape(rank, -1)[:own, part.first : part.last] = up_OR.T[:, out_O]
        longer.reshape(-1)[part.first : part.last] = longer_O[out_O]
    empty = {each: zeros(each) for each in {*specs}}
    whole = [empty[each] if own is None else own for each, own in zip(specs, matrices, strict=True)]
    has_head = any(target.is_head and own is not None for target, own in zip(targets, matrices, strict=True))
    return Adapter(digest(about_bytes, content), has_head, targets, whole)


def read_once(folder: Path) -> tuple[bytes, bytes]:
    """The bytes of an adapter's two files.

    The matrices and the digest are both made of them: files that are replaced meanwhile would have the digest of one
    adapter and the matrices of another.
    """
    for name, remedy in (
        (ADAPTER, ": it must be a folder that PEFT has written"),
        (FILE, "; adapters are read from safetensors alone"),
    ):
        if not (folder / name).is_file():
            raise ModelError(f"{folder} holds no {name}{remedy}")
    try:
        return (folder / ADAPTER).read_bytes(), (folder / FILE).read_bytes()
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from None


def zeros(specs: tuple[ArraySpec, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(spec.shape, spec.dtype) for spec in specs)


def find_weights(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The tensors of a model's folder by the names that adapters have for them."""
    tensors, parts = find_parts(folder, config)
    if config.tied and config.writes:
        tensors["lm_head.weight"] = tensors[parts.embed_VD[0].name]
    return tensors


def row_lengths(weight_OI: np.ndarray, down_RI: np.ndarray, up_OR: np.ndarray) -> np.ndarray:
    """The lengths of the rows of a weight with an adapter."""
    found = np.empty(len(weight_OI), np.float32)
    for at in range(0, len(found), STRIP):  # a whole matrix in float32 would leave every cache
        rows = slice(at, at + STRIP)
        found[rows] = np.linalg.norm(weight_OI[rows].astype(np.float32) + up_OR[rows] @ down_RI, axis=1)
    return found


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
    dora: bool

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


def read_about(where: Path, content: bytes) -> About:
    """The configuration of an adapter, if it is of a kind that is served."""
    given = read_json(where, content)
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
    for key in ("use_rslora", "use_dora"):
        if not isinstance(given.get(key) or False, bool):
            raise ModelError(f"{where}: {key} = {given[key]!r:.80}; it must be true or false")
    return About(rank, alpha, ranks, alphas, bool(given.get("use_rslora")), bool(given.get("use_dora")))


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


def tensors_of(file: Path, content: bytes, about: About) -> dict[str, tuple[Tensor, ...]]:
    """(down, up), of DoRA with lengths, of every module that a file adapts; a tensor that is none of them is named."""
    names = ("A", "B", "magnitude_vector")[: 3 if about.dora else 2]
    modules: dict[str, dict[str, Tensor]] = {}
    others: list[str] = []
    for name, tensor in read_header(file, content).items():
        if (found := NAME.fullmatch(name)) and (kind := found["half"] or found["lengths"]) in names:
            modules.setdefault(found[1], {})[kind] = tensor
        else:
            others.append(name)
    for name in others:
        if not (found := HEAD.fullmatch(name)) or found[1] not in modules:
            raise ModelError(
                f"{file} holds the tensor {name!r}, which is no {' or '.join(f'lora_{each}' for each in names)} of a "
                "linear layer; merge the adapter into the model's weights"
            )
    for module, own in modules.items():
        if lost := [name for name in names if name not in own]:
            raise ModelError(f"{file} lacks lora_{lost[0]} of {module!r}")
    if not modules:
        raise ModelError(f"{file} holds no tensors")
    return {module: tuple(own[name] for name in names) for module, own in modules.items()}


def check_shapes(file: Path, tensors: tuple[Tensor, ...], part: Part, about: About, module: str, most: int) -> int:
    """The rank of a module's matrices, if they fit the weight, the configuration and the stacks."""
    (down, up, *lengths), (outputs, inputs), rank = tensors, part.shape, about.rank_of(module)
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ModelError(
            f"{file}: lora_A and lora_B of {module!r} have shapes {list(down.shape)} and {list(up.shape)}; the model "
            f"and {ADAPTER} want {[rank, inputs]} and {[outputs, rank]}"
        )
    if lengths and lengths[0].shape != (outputs,):
        raise ModelError(
            f"{file}: lora_magnitude_vector of {module!r} has shape {list(lengths[0].shape)}; the model wants "
            f"{[outputs]}"
        )
    if rank > most:
        raise ModelError(f"{file}: {module!r} has rank {rank}; max_lora_rank is {most}")
    return rank


def digest(*contents: bytes) -> str:
    """A digest of the contents of an adapter's files."""
    found = hashlib.blake2b(digest_size=16)
    for content in contents:
        found.update(content)
    return found.hexdigest()
