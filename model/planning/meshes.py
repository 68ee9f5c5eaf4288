"""The meshes over which a model can be split, and the time of a step on each, from bytes and operations alone.

    seconds of a stage = max(bytes read / bandwidth, operations / speed) + bytes sent / link + latency of collectives

With p pipeline stages a step takes a p-th of the sequences, and p steps are under way: each token passes all stages,
and the slowest stage sets the throughput.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ...sharding.local_shards import sharded_shape
from ...sharding.mesh import AXES, DEVICE_ORDER, sharding
from ..config import Layer, ModelConfig, ModelError
from ..partition import Stage, check, split_config, splits, stage_weights, stages, whole_context
from ..weights import ModelWeights, abstract, dense_specs
from .cost import Device, layer_token_bytes, met_weights, score_width, seen, state_bytes
from .traffic import Collective, traffic

MACHINE = 8  # devices in a machine
PAGE = 16  # positions of a page, which `context` divides
LATENCY = 10e-6  # seconds of a collective, or of a copy to the next stage, however small


@dataclass(frozen=True)
class Workload:
    """What is to be served: `batch` sequences of this length, and prompts in chunks of `chunk` tokens."""

    batch: int
    length: int
    chunk: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step through all its stages, by what they are spent on, and those of the slowest stage."""

    read: float
    compute: float
    send: float
    total: float
    slowest: float
    sent: float  # bytes that leave the device that sends most


@dataclass(frozen=True)
class Choice:
    """A mesh and what it gives. Bytes are those of the device that holds most."""

    sizes: dict[str, int]
    weight_bytes: int
    sequence_bytes: int  # of the cache
    sequences: int  # of this length that fit beside the weights
    decode: StepTime
    prompt: StepTime
    tokens_a_second: float
    prompt_tokens_a_second: float


def meshes(config: ModelConfig, devices: int) -> list[dict[str, int]]:
    """The sizes of all meshes of so many devices; `tensor` stays within a machine, since it sends most often."""

    @cache
    def fits(axis: str, size: int) -> bool:
        try:
            check(config, **{"tensor": 1, "expert": 1, "pipe": 1, axis: size})
        except ModelError:
            return False
        return True

    @cache
    def share(sharing: int) -> bool:
        return splits(config, data=sharing)

    def divisors(left: int, most: int) -> list[int]:
        return [n for n in range(1, min(left, most) + 1) if left % n == 0]

    return [
        {"data": data, "pipe": left // context // data, "context": context, "tensor": tensor, "expert": expert}
        for tensor in divisors(devices, MACHINE)
        if fits("tensor", tensor)
        for expert in divisors(devices // tensor, devices)
        if fits("expert", expert)
        for left in (devices // tensor // expert,)
        for context in divisors(left, PAGE)
        if PAGE % context == 0 and (context == 1 or not whole_context(config))
        for data in divisors(left // context, left)
        if share(expert * context * data) and fits("pipe", left // context // data)
    ]


class Planner:
    """Estimates for one model on many meshes; what depends on some axes only is computed once for them."""

    def __init__(self, config: ModelConfig, device: Device, work: Workload, weights: ModelWeights | None = None):
        self.config, self.device, self.work = config, device, work
        self.weights = abstract(config) if weights is None else weights
        self.held, self.part = cache(self.bytes_of), cache(self.split_over)

    def bytes_of(self, tensor: int, sharing: int) -> ModelWeights:
        """Bytes of each leaf on a device, where `sharing` devices split the experts."""
        sizes = {"tensor": tensor, "expert": sharing}
        mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)

        def nbytes(spec) -> int:
            shape = sharding(spec, mesh).shard_shape(sharded_shape(spec, mesh))
            return math.prod(shape) * jnp.dtype(spec.dtype).itemsize

        return jax.tree.map(nbytes, self.weights)

    def split_over(self, tensor: int):
        """The model as one of `tensor` devices computes it, and the dense specs of its layers."""
        own = split_config(self.config, tensor)
        return own, dense_specs(own).layers

    def choice(self, sizes: Mapping[str, int]) -> Choice:
        work, parts, data = self.work, stages(self.config, sizes["pipe"]), sizes["data"]
        own, _ = self.part(sizes["tensor"])
        held = [sum(jax.tree.leaves(self.stage_weights(sizes, stage))) for stage in parts]
        kept = [
            sum(
                -(-layer_token_bytes(own.layers[index].attention, own.layer_kv_dtype(index)) // sizes["context"])
                * seen(own.layers[index].attention, work.length)
                for index in stage.layers
                if index in own.kv_layers
            )
            + state_bytes(own, stage.layers)
            for stage in parts
        ]
        room = [(self.device.memory - a) // max(b, 1) for a, b in zip(held, kept, strict=True)]
        batch = -(-work.batch // data)  # sequences of a replica
        fullest = max(range(len(parts)), key=lambda at: held[at] + batch * kept[at])
        each = -(-batch // sizes["pipe"])  # sequences of a step
        decode = self.time(sizes, each, each, work.length, False)
        prompt = self.time(sizes, work.chunk, 1, work.length // 2, True)  # a chunk in the middle of a prompt
        return Choice(
            dict(sizes),
            held[fullest],
            kept[fullest],
            data * max(0, int(min(room))),
            decode,
            prompt,
            min(data * each, work.batch) / decode.slowest,
            data * work.chunk / prompt.slowest,
        )

    def stage_weights(self, sizes: Mapping[str, int], stage: Stage) -> ModelWeights:
        """Bytes of each leaf that a device of a stage holds."""
        held = self.held(sizes["tensor"], sizes["expert"] * sizes["context"] * sizes["data"])
        own = stage_weights(held, stage)
        return own.replace(embed_VD=held.embed_VD) if self.config.tied and stage.ends else own

    def time(self, sizes: Mapping[str, int], rows: int, seqs: int, length: int, prompts: bool) -> StepTime:
        """The time of a step of so many rows and sequences, each of which sees `length` positions."""
        own, specs = self.part(sizes["tensor"])
        context, device = sizes["context"], self.device
        dense_rows = -(-rows // context) if prompts else rows
        same_rows = sizes["expert"] if prompts else context * sizes["expert"]  # devices
        found = []
        parts = stages(self.config, sizes["pipe"])
        for stage in parts:
            held, operations = self.stage_weights(sizes, stage), 0.0
            read = float(sum(jax.tree.leaves(held.replace(layers=(), per_layer_embed_VLA=None))))
            if not (self.config.tied and stage.ends):
                read -= sum(jax.tree.leaves(held.embed_VD))  # only a row of it for each token
            for index, weights in zip(stage.layers, held.layers, strict=True):
                layer = own.layers[index]
                experts = (
                    0 if weights.moe is None else sum(jax.tree.leaves((weights.moe.up_EDGF, weights.moe.down_EFD)))
                )
                read += sum(jax.tree.leaves(weights)) - experts * (1 - chosen(layer, rows * sizes["data"]))
                cached = layer_token_bytes(own.layers[own.kv_owner[index]].attention, own.layer_kv_dtype(index))
                read += seqs * (cached * seen(layer.attention, length) / context + state_bytes(own, [index]))
                operations += 2 * dense_rows * met_weights(own, layer, specs[index], same_rows)
                operations += 2 * rows * score_width(layer) * seen(layer.attention, length) / context
            if stage.ends:
                operations += 2 * seqs * self.config.dim * self.config.vocab_size / sizes["tensor"]
            sent = [self.sending(one, sizes) for one in traffic(self.config, sizes, rows, prompts, stage)]
            if not stage.ends:
                sent.append(self.hop(sizes, dense_rows))
            times = read / device.bandwidth, operations / device.flops, sum(seconds for _, seconds in sent)
            found.append((*times, max(times[:2]) + times[2], sum(nbytes for nbytes, _ in sent)))
        read, compute, send, total, nbytes = zip(*found, strict=True)
        return StepTime(sum(read), sum(compute), sum(send), sum(total), max(total), max(nbytes))

    def sending(self, one: Collective, sizes: Mapping[str, int]) -> tuple[float, float]:
        """(bytes that leave a device, seconds) of a collective: within machines, then between them."""
        count = math.prod(sizes[name] for name in one.axes)
        near = math.prod(min(sizes[name], max(1, MACHINE // stride(name, sizes))) for name in one.axes)
        far = -(-count // near)
        times = 2 if one.kind == "all-reduce" else 1
        if one.kind == "all-to-all":  # each part goes to one device
            within, across = one.nbytes * (near - 1) / count, one.nbytes * (count - near) / count
        else:  # within a machine first, so that each device sends a part to other machines
            within, across = one.nbytes * (near - 1) / near, one.nbytes / near * (far - 1) / far
        within, across = times * within, times * across
        return within + across, within / self.device.link + across / self.device.network + LATENCY

    def hop(self, sizes: Mapping[str, int], rows: int) -> tuple[float, float]:
        """The same for the rows that go to the next stage: each device sends its own copy."""
        nbytes = rows * self.config.dim * jnp.dtype(self.config.dtype).itemsize
        crosses = stride("pipe", sizes) * sizes["pipe"] > MACHINE
        return nbytes, nbytes / (self.device.network if crosses else self.device.link) + LATENCY


def stride(name: str, sizes: Mapping[str, int]) -> int:
    """The distance between neighbours along an axis, in devices."""
    return math.prod(sizes.get(axis, 1) for axis in DEVICE_ORDER[DEVICE_ORDER.index(name) + 1 :])


def chosen(layer: Layer, rows: int) -> float:
    """The expected share of the experts that so many rows choose, if all are equally likely."""
    return 1.0 if layer.moe is None else 1 - (1 - layer.moe.top_k / layer.moe.experts) ** rows


def choices(
    config: ModelConfig, device: Device, work: Workload, devices: int, weights: ModelWeights | None = None
) -> list[Choice]:
    """An estimate for each mesh of so many devices."""
    planner = Planner(config, device, work, weights)
    return [planner.choice(sizes) for sizes in meshes(config, devices)]


def least_bytes(choice: Choice, work: Workload) -> int:
    """The bytes that a device must hold."""
    return choice.weight_bytes + -(-work.batch // choice.sizes["data"]) * choice.sequence_bytes


def ranked(found: list[Choice], work: Workload, by: str = "throughput") -> list[Choice]:
    """The meshes that hold the workload, best first: `by` is throughput, latency or prompts."""
    keys = {
        "throughput": lambda choice: (-choice.tokens_a_second, choice.decode.total),
        "latency": lambda choice: (choice.decode.total, -choice.tokens_a_second),
        "prompts": lambda choice: (-choice.prompt_tokens_a_second, choice.prompt.total),
    }
    return sorted((choice for choice in found if choice.sequences >= work.batch), key=keys[by])


def refusal(
    config: ModelConfig, device: Device, work: Workload, devices: int, weights: ModelWeights | None = None
) -> ModelError:
    """The error that says why no mesh will do, and what would."""
    found = choices(config, device, work, devices, weights)
    if not found:
        fewer = next(n for power in range(devices.bit_length() - 1, -1, -1) if meshes(config, n := 2**power))
        return ModelError(f"--devices is {devices}, over which this model cannot be split; use {fewer}, for example")
    least = min(found, key=lambda choice: least_bytes(choice, work))
    most = max(choice.sequences for choice in found)
    needs = least_bytes(least, work) / 2**30
    text = (
        f"no mesh of {devices} devices holds {work.batch} sequences of {work.length} tokens: the least that a device "
        f"must hold is {needs:.1f} GiB, {least.weight_bytes / 2**30:.1f} of them weights, and it has "
        f"{device.memory / 2**30:.1f}"
    )
    below = 2 ** ((devices - 1).bit_length() - 1) if devices > 1 else 1  # a power of two
    others = (below, *(n * devices for n in (2, 4, 8, 16)))
    enough = (n for n in others if ranked(choices(config, device, work, n, weights), work))
    remedies = [f"--batch {most} or less"] if most else []
    remedies += [f"--devices {n}" for n in (next(enough, None),) if n is not None]
    return ModelError(f"{text}; use {' or '.join(remedies) or 'devices with more memory'}")
