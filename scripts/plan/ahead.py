"""Compile a step for a mesh without its devices: `python -m quire.scripts.plan.ahead MODEL --mesh
tensor=8,pipe=2`.

MODEL is a folder with a config.json, or a name in `MODELS`. A subprocess forces XLA's CPU backend
to have as many host devices as the mesh, and compiles the step from the shapes of weights and cache
alone. The result is the memory that each device would hold and the bytes that collectives would
send. Temporary buffers are those of the CPU compiler and differ from a GPU's.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
# Shapes only; RoPE scaling is left out because it changes no array size.
MODELS: dict[str, dict[str, Any]] = {
    "llama-70b": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-405b": LLAMA
    | {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "topk_group": 4,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
}
PAGE = 16
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\("
)
ARRAY = re.compile(r"([a-z]+)(\d+)\[([\d,]*)\]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help=f"model folder, or {', '.join(MODELS)}")
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        default="tensor=8",
        help="sizes of the mesh axes, as in tensor=8,pipe=2",
    )
    parser.add_argument("--batch", type=int, default=64, help="sequences per replica")
    parser.add_argument(
        "--length", type=int, default=4096, help="KV cache capacity in tokens per sequence"
    )
    parser.add_argument(
        "--rows",
        type=int,
        help="tokens of a step that includes prompts; default: a decode step, a token per sequence",
    )
    parser.add_argument("--quantization", help="weight format, as in quire serve")
    parser.add_argument("--kv-cache-dtype", default="auto", help="dtype of keys and values")
    parser.add_argument(
        "--here", action="store_true", help="compile in this process, which has enough devices"
    )
    args = parser.parse_args()
    sizes = args.mesh
    if not args.here:
        devices = math.prod(sizes.values())
        flags = [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={devices}",
        ]
        flags.append("--xla_backend_optimization_level=0")  # the machine code is never run
        env = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "quire.scripts.plan.ahead", *sys.argv[1:], "--here"]
        sys.exit(subprocess.run(command, env=env).returncode)
    config, specs = read(args.model, args.quantization, args.kv_cache_dtype, args.length)
    result = measure(config, sizes, args.batch, args.length, args.rows, specs)
    print(json.dumps({"model": args.model, "mesh": sizes, **result}))


def mesh_sizes(text: str) -> dict[str, int]:
    """Parse sizes of mesh axes such as `tensor=8,pipe=2`."""
    axes = re.findall(r"(tensor|expert|context|pipe|data)=([1-9][0-9]*)(?:,|$)", text)
    if (
        not axes
        or ",".join(f"{name}={size}" for name, size in axes) != text
        or len(dict(axes)) != len(axes)
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no mesh: write sizes of tensor, expert, context, pipe and data, as in "
            "tensor=8,pipe=2"
        )
    return {name: int(size) for name, size in axes}


def read(model: str, quantization: str | None, kv_cache_dtype: str, length: int):
    """(config, weight specs) of a model folder or of a name in `MODELS`."""
    from ...model.checkpoint.loader import family_for
    from ...model.weights import abstract
    from . import command

    if model in MODELS:
        config = family_for(MODELS[model]).config(MODELS[model], length)
        config = replace(config, quant=quantization, kv_cache_dtype=kv_cache_dtype)
        return config, abstract(config)
    return command.read(model, quantization=quantization, kv_cache_dtype=kv_cache_dtype)[1:]


def measure(
    config, sizes: Mapping[str, int], batch: int, length: int, rows: int | None = None, specs=None
) -> dict:
    """Compile a step and measure its memory and traffic in bytes.

    Memory is per device, of the pipeline stage that needs most; `sent` and `sampling` are the bytes
    of all stages' collectives, and `formula` is their estimate by the traffic model.
    """
    from ...model.checkpoint.placement import abstract_on_mesh
    from ...model.planning.traffic import traffic
    from ...model.weights import abstract
    from ...serving.device.batch import BatchLayout
    from ...serving.device.pipeline import Pipeline
    from ...serving.device.step_shape import Size, StepShape
    from ...serving.engine.cache_size import held_bytes, memory_of
    from ...sharding.mesh import make_mesh

    began = time.monotonic()
    specs = abstract(config) if specs is None else specs
    mesh = make_mesh(None, **sizes)
    groups = len(config.windows)
    width = -(-length // PAGE)
    pipeline = Pipeline(config, mesh)
    weights = abstract_on_mesh(config, mesh, specs)
    pages = batch * width + 1
    state = pipeline.abstract_state((pages,) * groups, PAGE, batch)
    shape = StepShape(Size(rows or batch, batch, batch), batch)
    layout = BatchLayout(shape.with_cache(groups, PAGE, length, sizes.get("data", 1)))
    model_bytes = Counter()
    sampling_bytes = Counter()
    stage_memory = []
    for lowered in pipeline.lower(weights, state, layout):
        compiled = lowered.compile()
        stage_memory.append(memory_of(compiled))
        text = compiled.as_text()
        assert text is not None  # CPUs have a text of each program
        stage_model_bytes, stage_sampling_bytes = collectives(text)
        model_bytes += stage_model_bytes
        sampling_bytes += stage_sampling_bytes
    fullest = max(stage_memory, key=lambda memory: memory.arguments)
    estimated_bytes = Counter()
    for transfer in traffic(config, sizes, rows or batch, rows is not None):
        estimated_bytes[transfer.kind] += transfer.nbytes
    return {
        "batch": batch,
        "rows": rows or batch,
        "cache_tokens": batch * width * PAGE,
        "weights": held_bytes(weights),
        "cache": held_bytes(state.pages),
        "arguments": fullest.arguments,
        "temporaries": fullest.temporaries,
        "results": fullest.results,
        "sent": dict(model_bytes),
        "formula": dict(estimated_bytes),
        "sampling": dict(sampling_bytes),
        "seconds": round(time.monotonic() - began, 1),
    }


def collectives(text: str) -> tuple[Counter, Counter]:
    """(bytes of the model's collectives, bytes of sampling's collectives) by kind of collective,
    from a compiled program's HLO text.

    XLA for CPUs computes bfloat16 all-reduces in float32 and marks them as promoted; these count
    with the size of bfloat16.
    """
    model = Counter()
    sampling = Counter()
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        bits = sum(
            int(width) * math.prod(map(int, shape.split(",") if shape else ()))
            for _, width, shape in ARRAY.findall(match[1])
        )
        (sampling if "/sample/" in line else model)[match[2]] += bits // (
            16 if "_promoted" in line else 8
        )
    return model, sampling


if __name__ == "__main__":
    main()
