"""A program that builds one of FlashInfer's kernels and prints its path; `library.py` runs it."""

import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from flashinfer.jit.attention import gen_customize_batch_prefill_module  # pyright: ignore[reportMissingImports]
from flashinfer.jit.attention.variants import attention_sink_decl  # pyright: ignore[reportMissingImports]

from .library import Kernel

SINKS = "AttentionSink"
PLAIN = "DefaultAttention"


def build(kernel: Kernel) -> Path:
    """Build FlashInfer's FlashAttention-2 kernel for paged attention, with the kernel's options."""
    dtype = getattr(torch, kernel.dtype)
    if kernel.sinks:
        variant = SINKS
        declared = attention_sink_decl["fa2"]
    else:
        options = ", ".join(
            str(option).lower() for option in (False, kernel.window, kernel.soft_cap, False)
        )
        variant = f"{PLAIN}<{options}>"
        declared = "#include <flashinfer/attention/variants.cuh>"
    spec = gen_customize_batch_prefill_module(
        "fa2",
        kernel.name,
        dtype,
        dtype,
        dtype,
        torch.int32,
        kernel.width,
        kernel.width,
        ["sink"] * kernel.sinks,
        ["float"] * kernel.sinks,
        ["logits_soft_cap", "sm_scale"],
        ["double", "double"],
        variant,
        declared,
        use_sliding_window=kernel.window,
        use_logits_soft_cap=kernel.soft_cap,
        paged_kv_stride_mode="independent",
        module_surface="paged",
    )
    spec.build_and_load()
    return spec.get_library_path()


if __name__ == "__main__":
    print(build(Kernel(**json.loads(sys.argv[1]))))
