"""The meshes over which a model can be split, and the estimated step time on each.

    seconds of a stage = max(bytes read / bandwidth, operations / speed) + bytes sent / link +
latency of collectives

With p pipeline stages a step takes a p-th of the sequences, and p steps are in flight: each token
passes all stages, and the slowest stage limits the throughput.
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
from ..partition import (
    Stage,
    check,
    no_context_parallelism_reason,
    split_config,
    splits,
    stage_weights,
    stages,
)
from ..weights import ModelWeights, abstract, dense_specs
from .cost import Device, active_weights, layer_token_bytes, score_width, seen, state_bytes
from .traffic import Collective, traffic

MACHINE = 8  # devices of a machine
PAGE = 16  # positions of a page; `context` must divide it
LATENCY = 10e-6  # seconds of the smallest collective or copy to the next stage


@dataclass(frozen=True)
class Workload:
    """The load: `batch` sequences of this length, and prompts in chunks of `chunk` tokens."""

    batch: int
    length: int
    chunk: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step through all stages, by what they are spent on, and of the slowest stage."""

    read: float
    compute: float
    send: float
    total: float
    slowest: float
    sent: float  # bytes sent by the device that sends most


@dataclass(frozen=True)
class MeshEstimate:
    """A mesh and its estimates. Bytes are those of the fullest device."""

    sizes: dict[str, int]
    weight_bytes: int
    sequence_bytes: int  # of KV cache and states
    sequences: int  # that fit beside the weights
    decode: StepTime
    prompt: StepTime
    tokens_a_second: float
    prompt_tokens_a_second: float


def meshes(config: ModelConfig, devices: int) -> list[dict[str, int]]:
    """The sizes of all meshes of `devices` devices; `tensor` stays within a machine, as it
    communicates most.
    """

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

    def divisors(number: int, limit: int) -> list[int]:
        return [n for n in range(1, min(number, limit) + 1) if number % n == 0]

    return [
        {
            "data": data,
            "pipe": remaining // context // data,
            "context": context,
            "tensor": tensor,
            "expert": expert,
        }
        for tensor in divisors(devices, MACHINE)
        if fits("tensor", tensor)
        for expert in divisors(devices // tensor, devices)
        if fits("expert", expert)
        for remaining in (devices // tensor // expert,)
        for context in divisors(remaining, PAGE)
        if PAGE % context == 0 and (context == 1 or not no_context_parallelism_reason(config))
        for data in divisors(remaining // context, remaining)
        if share(expert * context * data) and fits("pipe", remaining // context // data)
    ]


class Planner:
    """Estimates for one model on many meshes; results that depend on some axes only are cached."""

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        work: Workload,
        weights: ModelWeights | None = None,
    ):
        self.config = config
        self.device = device
        self.work = work
        self.weights = abstract(config) if weights is None else weights
        self.leaf_bytes = cache(self.leaf_bytes_on_device)
        self.split_model = cache(self.split_over_tensor)

    def leaf_bytes_on_device(self, tensor: int, sharing: int) -> ModelWeights:
        """Bytes of each leaf on a device, if `sharing` devices split the experts."""
        sizes = {"tensor": tensor, "expert": sharing}
        mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES)

        def nbytes(spec) -> int:
            shape = sharding(spec, mesh).shard_shape(sharded_shape(spec, mesh))
            return math.prod(shape) * jnp.dtype(spec.dtype).itemsize

        return jax.tree.map(nbytes, self.weights)

    def split_over_tensor(self, tensor: int):
        """The model as one of `tensor` devices computes it, and the dense specs of its layers."""
        local_config = split_config(self.config, tensor)
        return local_config, dense_specs(local_config).layers

    def evaluate(self, sizes: Mapping[str, int]) -> MeshEstimate:
        work = self.work
        stage_list = stages(self.config, sizes["pipe"])
        data = sizes["data"]
        local_config, _ = self.split_model(sizes["tensor"])
        weight_bytes = [
            sum(jax.tree.leaves(self.stage_weights(sizes, stage))) for stage in stage_list
        ]
        sequence_bytes = [
            sum(
                -(
                    -layer_token_bytes(
                        local_config.layers[index].attention, local_config.layer_kv_dtype(index)
                    )
                    // sizes["context"]
                )
                * seen(local_config.layers[index].attention, work.length)
                for index in stage.layers
                if index in local_config.kv_layers
            )
            + state_bytes(local_config, stage.layers)
            for stage in stage_list
        ]
        capacity = [
            (self.device.memory - a) // max(b, 1)
            for a, b in zip(weight_bytes, sequence_bytes, strict=True)
        ]
        batch = -(-work.batch // data)  # sequences of a replica
        fullest = max(
            range(len(stage_list)),
            key=lambda stage: weight_bytes[stage] + batch * sequence_bytes[stage],
        )
        step_batch = -(-batch // sizes["pipe"])  # sequences of a step
        decode = self.time(sizes, step_batch, step_batch, work.length, False)
        # A chunk in the middle of a prompt.
        prompt = self.time(sizes, work.chunk, 1, work.length // 2, True)
        return MeshEstimate(
            dict(sizes),
            weight_bytes[fullest],
            sequence_bytes[fullest],
            data * max(0, int(min(capacity))),
            decode,
            prompt,
            min(data * step_batch, work.batch) / decode.slowest,
            data * work.chunk / prompt.slowest,
        )

    def stage_weights(self, sizes: Mapping[str, int], stage: Stage) -> ModelWeights:
        """Bytes of each leaf on a device of a stage."""
        leaf_bytes = self.leaf_bytes(
            sizes["tensor"], sizes["expert"] * sizes["context"] * sizes["data"]
        )
        stage_bytes = stage_weights(leaf_bytes, stage)
        return (
            stage_bytes.replace(embed_VD=leaf_bytes.embed_VD)
            if self.config.tied and stage.is_last
            else stage_bytes
        )

    def time(
        self, sizes: Mapping[str, int], num_tokens: int, seqs: int, length: int, prompts: bool
    ) -> StepTime:
        """The time of a step of so many tokens and sequences, which attend to `length` positions
        each.
        """
        local_config, specs = self.split_model(sizes["tensor"])
        context = sizes["context"]
        device = self.device
        tokens_per_device = -(-num_tokens // context) if prompts else num_tokens
        expert_sharing = sizes["expert"] if prompts else context * sizes["expert"]  # devices
        stage_times = []
        stage_list = stages(self.config, sizes["pipe"])
        for stage in stage_list:
            leaf_bytes = self.stage_weights(sizes, stage)
            operations = 0.0
            read = float(
                sum(jax.tree.leaves(leaf_bytes.replace(layers=(), per_layer_embed_VLA=None)))
            )
            if not (self.config.tied and stage.is_last):
                read -= sum(jax.tree.leaves(leaf_bytes.embed_VD))  # only one row for each token
            for index, weights in zip(stage.layers, leaf_bytes.layers, strict=True):
                layer = local_config.layers[index]
                experts = (
                    0
                    if weights.moe is None
                    else sum(jax.tree.leaves((weights.moe.up_EDGF, weights.moe.down_EFD)))
                )
                read += sum(jax.tree.leaves(weights)) - experts * (
                    1 - chosen(layer, num_tokens * sizes["data"])
                )
                cached = layer_token_bytes(
                    local_config.layers[local_config.kv_owner[index]].attention,
                    local_config.layer_kv_dtype(index),
                )
                read += seqs * (
                    cached * seen(layer.attention, length) / context
                    + state_bytes(local_config, [index])
                )
                operations += (
                    2
                    * tokens_per_device
                    * active_weights(local_config, layer, specs[index], expert_sharing)
                )
                operations += (
                    2 * num_tokens * score_width(layer) * seen(layer.attention, length) / context
                )
            if stage.is_last:
                operations += 2 * seqs * self.config.dim * self.config.vocab_size / sizes["tensor"]
            sent = [
                self.collective_cost(collective, sizes)
                for collective in traffic(self.config, sizes, num_tokens, prompts, stage)
            ]
            if not stage.is_last:
                sent.append(self.stage_transfer_cost(sizes, tokens_per_device))
            times = (
                read / device.bandwidth,
                operations / device.flops,
                sum(seconds for _, seconds in sent),
            )
            stage_times.append(
                (*times, max(times[:2]) + times[2], sum(nbytes for nbytes, _ in sent))
            )
        read, compute, send, total, nbytes = zip(*stage_times, strict=True)
        return StepTime(sum(read), sum(compute), sum(send), sum(total), max(total), max(nbytes))

    def collective_cost(
        self, collective: Collective, sizes: Mapping[str, int]
    ) -> tuple[float, float]:
        """(bytes sent by a device, seconds) of a collective: within machines, then between them."""
        count = math.prod(sizes[name] for name in collective.axes)
        machine_devices = math.prod(
            min(sizes[name], max(1, MACHINE // stride(name, sizes))) for name in collective.axes
        )
        num_machines = -(-count // machine_devices)
        times = 2 if collective.kind == "all-reduce" else 1
        if collective.kind == "all-to-all":  # each slice goes to one device
            local_bytes = collective.nbytes * (machine_devices - 1) / count
            network_bytes = collective.nbytes * (count - machine_devices) / count
        else:  # within a machine first, then a slice to other machines
            local_bytes = collective.nbytes * (machine_devices - 1) / machine_devices
            network_bytes = collective.nbytes / machine_devices * (num_machines - 1) / num_machines
        local_bytes = times * local_bytes
        network_bytes = times * network_bytes
        return (
            local_bytes + network_bytes,
            local_bytes / self.device.link + network_bytes / self.device.network + LATENCY,
        )

    def stage_transfer_cost(self, sizes: Mapping[str, int], num_tokens: int) -> tuple[float, float]:
        """(bytes, seconds) of sending activations to the next stage: each device sends its own
        copy.
        """
        nbytes = num_tokens * self.config.dim * jnp.dtype(self.config.dtype).itemsize
        crosses = stride("pipe", sizes) * sizes["pipe"] > MACHINE
        return nbytes, nbytes / (self.device.network if crosses else self.device.link) + LATENCY


def stride(name: str, sizes: Mapping[str, int]) -> int:
    """The distance between neighbours along an axis, in devices."""
    return math.prod(sizes.get(axis, 1) for axis in DEVICE_ORDER[DEVICE_ORDER.index(name) + 1 :])


def chosen(layer: Layer, num_tokens: int) -> float:
    """The expected fraction of experts that so many tokens select, if all are equally likely."""
    return 1.0 if layer.moe is None else 1 - (1 - layer.moe.top_k / layer.moe.experts) ** num_tokens


def evaluate_meshes(
    config: ModelConfig,
    device: Device,
    work: Workload,
    devices: int,
    weights: ModelWeights | None = None,
) -> list[MeshEstimate]:
    """An estimate for each mesh of `devices` devices."""
    planner = Planner(config, device, work, weights)
    return [planner.evaluate(sizes) for sizes in meshes(config, devices)]


def required_bytes(choice: MeshEstimate, work: Workload) -> int:
    """The bytes that a device needs."""
    return choice.weight_bytes + -(-work.batch // choice.sizes["data"]) * choice.sequence_bytes


def rank_meshes(
    candidates: list[MeshEstimate], work: Workload, objective: str = "throughput"
) -> list[MeshEstimate]:
    """The meshes that hold the workload, best first: by throughput, latency or prompts."""
    keys = {
        "throughput": lambda choice: (-choice.tokens_a_second, choice.decode.total),
        "latency": lambda choice: (choice.decode.total, -choice.tokens_a_second),
        "prompts": lambda choice: (-choice.prompt_tokens_a_second, choice.prompt.total),
    }
    return sorted(
        (choice for choice in candidates if choice.sequences >= work.batch), key=keys[objective]
    )


def no_mesh_error(
    config: ModelConfig,
    device: Device,
    work: Workload,
    devices: int,
    weights: ModelWeights | None = None,
) -> ModelError:
    """The error that says why no mesh holds the workload, and what would."""
    candidates = evaluate_meshes(config, device, work, devices, weights)
    if not candidates:
        fewer = next(
            n for power in range(devices.bit_length() - 1, -1, -1) if meshes(config, n := 2**power)
        )
        return ModelError(
            f"--devices is {devices}, over which this model cannot be split; use {fewer}, for "
            "example"
        )
    smallest = min(candidates, key=lambda choice: required_bytes(choice, work))
    max_sequences = max(choice.sequences for choice in candidates)
    required_gib = required_bytes(smallest, work) / 2**30
    text = (
        f"no mesh of {devices} devices holds {work.batch} sequences of {work.length} tokens: a "
        f"device needs at least {required_gib:.1f} GiB, {smallest.weight_bytes / 2**30:.1f} of "
        f"them weights, and it has {device.memory / 2**30:.1f}"
    )
    fewer_devices = 2 ** ((devices - 1).bit_length() - 1) if devices > 1 else 1  # a power of two
    device_counts = (fewer_devices, *(n * devices for n in (2, 4, 8, 16)))
    sufficient = (
        n
        for n in device_counts
        if rank_meshes(evaluate_meshes(config, device, work, n, weights), work)
    )
    remedies = [f"--batch {max_sequences} or less"] if max_sequences else []
    remedies += [f"--devices {n}" for n in (next(sufficient, None),) if n is not None]
    return ModelError(f"{text}; use {' or '.join(remedies) or 'devices with more memory'}")
