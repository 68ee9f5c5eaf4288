"""`quire plan`: estimate a model's memory, and the batch size at which decoding becomes
compute-bound, from its configuration files alone.
"""

import json
import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from ...serving.api.sizes import amount
from .. import options as o
from ..sizes import size
from ..tables import length_name, table
from . import meshes as meshes
from .images import image_costs
from .images import text as images_text

MACHINE = "The device"
SEVERAL = "Several devices"
UNITS = {"bandwidth": 1e9, "link": 1e9, "network": 1e9, "flops": 1e12}


def device_option(help: str, metavar: str) -> Any:
    return o.option(help, MACHINE, metavar, "the device's", min=0.001)


ENGINE_OPTIONS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "gpu_memory_utilization",
)


@o.takes_engine(only=(*ENGINE_OPTIONS, *o.SOURCE))
def main(
    model: o.Model = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            parser=size,
            metavar="TOKENS",
            help="Sequence length (prompt and output) to plan for; may be given several times.",
            show_default="1K, 4K, 16K, ... up to the model's context length",
        ),
    ] = None,
    *,
    engine: dict[str, Any],
    device: Annotated[
        str,
        o.option(
            "Device to plan for: b200, h200, h100, a100, l4, rtx-5090, rtx-4090, tpu-v5e, "
            "tpu-v5p, tpu-v6e, tpu-v7x or cpu.",
            MACHINE,
            "NAME",
        ),
    ] = "h100",
    memory: Annotated[
        int | None,
        o.size_option(
            "Memory for weights and KV cache, as in 72G.",
            MACHINE,
            "BYTES",
            "the device's memory times --gpu-memory-utilization",
        ),
    ] = None,
    bandwidth: Annotated[float | None, device_option("Memory bandwidth.", "GB/S")] = None,
    flops: Annotated[
        float | None, device_option("Peak dense bfloat16 throughput, without sparsity.", "TFLOP/S")
    ] = None,
    link: Annotated[
        float | None,
        device_option(
            "Bandwidth between devices of a machine (NVLink, ICI), per direction.", "GB/S"
        ),
    ] = None,
    network: Annotated[
        float | None,
        device_option("Network bandwidth between machines per device and direction.", "GB/S"),
    ] = None,
    devices: Annotated[
        int | None,
        o.option(
            "Number of devices; proposes parallelism sizes (a mesh).",
            SEVERAL,
            default_text=False,
            min=1,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        o.option(
            "Number of sequences that decode together, each as long as the first --length.",
            SEVERAL,
            default_text="64",
            min=1,
        ),
    ] = None,
    best: Annotated[
        str | None,
        o.option(
            "What to optimise the mesh for: throughput, latency or prompts (prefill throughput).",
            SEVERAL,
            "GOAL",
            "throughput",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
) -> None:
    """Estimate the memory of a model's weights and KV cache, and how many sequences fit.

    Reads config.json, and how images are read, so no weights are downloaded.
    """
    from ...model.planning import cost  # not at the top: `--help` must not wait for JAX

    if device not in cost.DEVICES:
        raise o.UsageError(f"--device is {device!r}; it can be {', '.join(cost.DEVICES)}")
    if length and min(length) < 1:
        raise o.UsageError(f"--length is {min(length)}; it must be at least 1")
    overrides = o.drop_none(bandwidth=bandwidth, link=link, network=network, flops=flops)
    chosen = replace(
        cost.DEVICES[device],
        **{name: value * UNITS.get(name, 1) for name, value in overrides.items()},
    )
    meshes.check(devices, batch, best)
    share = engine.pop("gpu_memory_utilization", None)
    check_share(share, memory)
    folder, config, weights = read(model, **engine)
    if config.encodes and devices is not None:
        raise o.UsageError(
            "--devices proposes meshes for models that write, and this one reads each text in "
            "one step"
        )
    images = None if devices is not None else image_costs(folder, config, chosen)
    image_bytes = 0 if images is None else images.get("bytes", 0)
    usable, reason = usable_memory(
        device, chosen.memory, cost.weight_bytes(config, weights) + image_bytes, share, memory
    )
    lengths = [] if config.encodes else sorted(set(length or default_lengths(config.max_len)))
    result = {
        "model": model or "quill",
        "layers": len(config.layers),
        "dtype": config.weights_format,
        "kv_cache_dtype": config.kv_dtype,
        "weight_bytes": cost.weight_bytes(config, weights),
        "kv_bytes_a_token": sum(kind.token_bytes for kind in cost.cache_kinds(config)),
        "state_bytes": cost.state_bytes(config),
        "images": images,
        "kinds": [
            {
                "name": kind.name,
                "layers": kind.layers,
                "bytes_a_token": kind.token_bytes,
                "window": kind.window,
            }
            for kind in cost.cache_kinds(config)
        ],
        "device": {"name": device, **vars(chosen)},
        "usable_memory": usable,
        "usable_memory_is": reason,
        "balance_batch_without_cache": finite(cost.balance_batch(config, 0, chosen, weights)),
        "lengths": [
            {
                "length": tokens,
                "kv_bytes": cost.kv_bytes(config, tokens),
                "sequences_that_fit": cost.sequences_that_fit(
                    config, tokens, usable - image_bytes, weights
                ),
                "balance_batch": finite(cost.balance_batch(config, tokens, chosen, weights)),
            }
            for tokens in lengths
        ],
        "split": []
        if config.encodes
        else split(
            config, usable - image_bytes - cost.weight_bytes(config, weights), chosen.platform
        ),
    }
    if devices is not None:
        tokens = length[0] if length else min(4096, config.max_len)
        usable_device = replace(chosen, memory=usable)
        result["meshes"] = meshes.propose(
            config, weights, usable_device, devices, batch or 64, tokens, best
        )
    if as_json:
        print(json.dumps(result))
    else:
        print(text(result) if devices is None else meshes.text(result))


def check_share(share: float | None, memory: int | None) -> None:
    if share is not None and memory is not None:
        raise o.UsageError(
            "--memory and --gpu-memory-utilization both say what may be used: leave one out"
        )
    if share is not None and not 0 < share <= 1:
        raise o.UsageError(
            f"--gpu-memory-utilization is {share:g}; it must be above 0 and at most 1"
        )


def usable_memory(
    device: str, capacity: float, weights: int, share: float | None, memory: int | None
) -> tuple[float, str]:
    """(bytes for weights and KV cache by the engine's own rules, which rule that is).

    Args:
        device: Name of the device.
        capacity: Its memory in bytes.
        weights: Bytes of the weights.
        share: `--gpu-memory-utilization`, or None.
        memory: `--memory` in bytes, or None.
    """
    from ...serving.api.options import CPU_CACHE, SHARE

    if memory is not None:
        return memory, "as --memory says"
    if device == "cpu" and share is None:
        cache = min(capacity / 4, CPU_CACHE)
        return min(capacity, weights + cache), f"the weights, and {amount(cache)} for the KV cache"
    share = SHARE if share is None else share
    return capacity * share, f"{share:.4g} of it, --gpu-memory-utilization"


def read(model: str | None, **engine: Any):
    """(folder, config, weight specs) of a model folder, a Hugging Face model ID or the bundled model."""
    from ...model.checkpoint import hub
    from ...model.checkpoint.loader import read_config, weight_specs
    from ...model.multimodal import PREPROCESSOR, PROCESSOR

    source = {name: engine.pop(name) for name in ("revision", "download_dir") if name in engine}
    folder = hub.resolve(model, ["config.json", PREPROCESSOR, PROCESSOR], **source)
    config = read_config(folder, **engine)
    return folder, config, weight_specs(config)


def split(config, budget: float, platform: str) -> list[dict]:
    """How the engine would divide `budget` bytes among the KV cache groups (full attention and each
    sliding window); empty if they are too few.
    """
    from ...model.config import ModelError
    from ...serving.api.options import EngineOptions
    from ...serving.device.state import page_bytes
    from ...serving.engine.cache_size import size_cache

    options = EngineOptions(max_model_len=-1).on(platform)
    try:
        length, pages = size_cache(config, options, max(0, int(budget)))
    except ModelError:
        return []
    pages = pages[: len(config.windows)]  # leaves out the recurrent-state snapshots
    sizes = [page_bytes(config, group, options.block_size) for group in range(len(pages))]
    return [
        {
            "window": window,
            "pages": count,
            "page_bytes": size,
            "share": count * size / sum(a * b for a, b in zip(pages, sizes, strict=True)),
            "sequences": options.max_num_seqs,
            "length": length,
        }
        for window, count, size in zip(config.windows, pages, sizes, strict=True)
    ]


def default_lengths(longest: int) -> list[int]:
    return [tokens for tokens in (2**10, 2**12, 2**14, 2**16, 2**18, 2**20) if tokens < longest] + [
        longest
    ]


def finite(batch: float) -> float | None:
    """The rounded batch size, or None for infinity, which JSON cannot represent."""
    return None if math.isinf(batch) else round(batch, 1)


def text(result: dict) -> str:
    """The result as text with tables."""
    device = result["device"]
    weights = amount(result["weight_bytes"])
    head = (
        f"{result['model']}: {result['layers']} layers, {weights} of weights in {result['dtype']}"
    )
    used = (
        f"{device_line(device)}\nused: {amount(result['usable_memory'])} "
        f"({result['usable_memory_is']})"
    )
    if not result["lengths"]:
        return (
            f"{head}\n\n{used}\n\nAn encoder: it reads each text in one step, and keeps no KV "
            "cache."
        )
    kinds = [
        (
            kind["name"],
            kind["layers"],
            amount(kind["bytes_a_token"]),
            cached_tokens_text(kind, result["state_bytes"]),
        )
        for kind in result["kinds"]
    ]
    kinds.append(("all", result["layers"], amount(result["kv_bytes_a_token"]), ""))
    lengths = [
        (
            length_name(row["length"]),
            amount(row["kv_bytes"]),
            f"{row['sequences_that_fit']:,}",
            "never" if row["balance_batch"] is None else f"{math.ceil(row['balance_batch']):,}",
        )
        for row in result["lengths"]
    ]
    return "\n\n".join(
        (
            head,
            *([] if result["images"] is None else [images_text(result["images"])]),
            table(("KV cache", "layers", "bytes a token", "tokens kept"), kinds),
            used,
            table(
                ("length", "KV a sequence", "sequences that fit", "batch where compute catches up"),
                lengths,
            ),
            *([] if len(result["split"]) < 2 else [split_table(result["split"])]),
            notes(result),
        )
    )


def cached_tokens_text(kind: dict, state_bytes: int) -> str:
    """How many tokens of a sequence these layers cache: all, a window, or a recurrent state."""
    return (
        f"none, but {amount(state_bytes)}"
        if kind["name"] == "state"
        else length_name(kind["window"])
    )


def device_line(device: dict) -> str:
    """The device and its memory, bandwidth and compute throughput."""
    return (
        f"{device['name']}, {device['about']}: {amount(device['memory'])}, "
        f"{device['bandwidth'] / 1e9:,.0f} GB/s, {device['flops'] / 1e12:,.4g} TFLOP/s"
    )


def split_table(groups: list[dict]) -> str:
    rows = [
        (
            length_name(group["window"]),
            f"{group['pages']:,}",
            amount(group["page_bytes"]),
            f"{group['share']:.1%}",
        )
        for group in groups
    ]
    first = groups[0]
    heading = (
        f"pages of 16 tokens, for {first['sequences']} sequences of up to "
        f"{length_name(first['length'])}:"
    )
    return f"{heading}\n{table(('tokens kept', 'pages', 'each', 'of the memory'), rows)}"


def notes(result: dict) -> str:
    """Explanations of the table columns, and what the estimates leave out."""
    balance = result["balance_batch_without_cache"]  # None: never, reading states dominates
    lines = [
        (
            "bytes a token: what a sequence's KV cache grows by with each token, in these layers "
            "together"
        ),
        (
            "tokens kept: the last tokens of a sequence that these layers keep; all, or a window "
            "of them"
        ),
        *["  none, but so many bytes for each sequence: their state"] * bool(result["state_bytes"]),
        "length: tokens of a prompt and its answer together",
        "KV a sequence: the KV cache of one sequence of this length",
        (
            "sequences that fit: at once, beside the weights; a step's own working memory is not "
            "counted"
        ),
        (
            "batch where compute catches up: with fewer sequences a step waits for memory, with "
            "more for arithmetic"
        ),
        *([] if balance is None else [f"  ({math.ceil(balance):,} where the cache is left out)"]),
    ]
    if any(row["balance_batch"] is None for row in result["lengths"]):
        lines.append(
            "never: a sequence's cache takes longer to read than its arithmetic takes, at any batch"
        )
    if result["weight_bytes"] > result["usable_memory"]:
        lines.append(f"The weights alone do not fit: they take {amount(result['weight_bytes'])}.")
    return "\n".join(lines)
