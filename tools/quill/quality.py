"""Measure the quality loss of quantising quill, by format and method: `python -m
tools.quill.quality table.md`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .corpus import documents, encode
from .eval import evaluate
from .tasks import BOS

TUNED = ", fine-tuned"  # suffix of methods followed by fine-tuning
EPOCHS = 8
WAYS = {
    "int8": ("rtn", "gptq", "awq", "smoothquant"),
    "int8-weights": ("rtn", "gptq"),
    "fp8": ("rtn", "smoothquant"),
    "int4-32": ("rtn", "gptq", "awq"),
    "int4-64": ("rtn", "gptq", "awq"),
    "int4-64-zero": ("rtn", "gptq", "awq"),
    "codebook-4": ("rtn", "squeezellm"),
    "e8p-4": ("quip",),
    "int3-32": ("rtn", "gptq", "awq"),
    "codebook-3": ("rtn", "squeezellm"),
    "int2-32": ("rtn", "gptq", "awq"),
    "e8p-2": ("rtn", "quip", f"quip{TUNED}"),
    "4 bits": ("gptq",),
    "4.5 bits": ("rtn", "gptq"),
    "5 bits": ("gptq",),
}  # no groups of 128, because quill's matrices have 192 inputs
CACHES = {
    "int8": {"kv_cache_dtype": "int8"},
    "int4": {"kv_cache_dtype": "int4"},
    "int4, windows wide": {
        "kv_cache_dtype": "int4",
        "kv_cache_dtype_skip_layers": ["sliding_window"],
    },
    "fp8": {"kv_cache_dtype": "fp8"},
}
ROWS = {
    f"{name}{', rows of bytes' * (rows == 'int8')}": {
        "quantization": name,
        "activation_dtype": rows,
    }
    for name in ("int4-32", "int4-64", "int4-64-zero", "mxfp4")
    for rows in ("auto", "int8")
}


def said(llm: Any, count: int, seed: int) -> np.ndarray:
    """The log-probabilities of tokens with a loss weight in held-out documents."""
    from tokenizers import Tokenizer

    from quire import SamplingParams
    from quire.model.checkpoint import hub

    tokenizer = Tokenizer.from_file(str(hub.resolve("quill") / "tokenizer.json"))
    held_out_documents = [
        encode(tokenizer, document) for document in documents(f"held-out/{seed}", count)
    ]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in held_out_documents], params, use_tqdm=False
    )
    logprobs = [
        entry[token].logprob
        for (ids, weights), out in zip(held_out_documents, outputs, strict=True)
        for token, weight, entry in zip(ids, weights, out.prompt_logprobs, strict=True)
        if weight and entry is not None
    ]
    return np.array(logprobs)


def evaluate_model(
    model: str | None, samples: int, held_out: int, seed: int, **engine: Any
) -> dict[str, Any]:
    """Evaluate a model: right answers (`right` of `asked`), and log-probabilities (`said`)."""
    from quire import LLM

    with LLM(model, **engine) as llm:
        logprobs = said(llm, held_out, seed)
        tasks = evaluate(llm, samples, seed).values()
    right, num_asked = (sum(int(task[name]) for task in tasks) for name in ("right", "samples"))
    return {"right": right, "asked": num_asked, "said": logprobs}


def quantise(out: Path, quantization: str, method: str, calibration: int, seed: int) -> None:
    """Quantise the bundled model and write it to a folder."""
    from quire.model.checkpoint import hub, loader, quantized
    from quire.model.quantize import mixed, session
    from quire.model.text.tokenizer import Tokenizer

    folder = hub.resolve("quill")
    bits = None
    if quantization.endswith(" bits"):  # mixed precision
        bits = float(quantization.removesuffix(" bits"))
        quantization = mixed.ANY
    config = loader.read_config(folder, quantization=quantization)
    if method == "rtn" and bits is None:
        quantized.save(folder, out, config)
        return
    tokenizer = Tokenizer(folder)
    texts = (
        "".join(piece for piece, _ in document)
        for document in documents(f"calibration/{seed}", calibration)
    )
    pieces = [tokenizer.encode(text.removeprefix(BOS))[: config.max_len] for text in texts]
    epochs = EPOCHS if method.endswith(TUNED) else 0
    session.save(
        folder, out, config, method.removesuffix(TUNED), pieces, bits=bits, fine_tune_epochs=epochs
    )


def main(
    table: Annotated[Path, typer.Argument(help="Output file (Markdown).")],
    samples: Annotated[int, typer.Option(min=1, help="Fresh samples per task.")] = 20,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out documents for perplexity.")] = 400,
    calibration: Annotated[int, typer.Option(min=1, help="Calibration documents.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed for samples and documents.")] = 0,
    kv_cache: Annotated[
        bool, typer.Option("--kv-cache", help="Quantise the KV cache instead of the weights.")
    ] = False,
    activations: Annotated[
        bool, typer.Option("--activations", help="Compare int8 activations with unquantised ones.")
    ] = False,
):
    """Write a table of exact answers and perplexity by format and method."""
    start = time.monotonic()
    baseline = evaluate_model(None, samples, held_out, seed)
    lines = [
        (
            f"quill: exact answers to {baseline['asked']} questions, {samples} of each task; "
            f"perplexity of {len(baseline['said']):,} held-out tokens; drift, the root of the mean "
            "square of how far their log-probabilities are from those in bfloat16; calibration on "
            f"{calibration} documents."
        ),
        "",
        "| format | method | exact answers | perplexity | drift |",
        "|---|---|---|---|---|",
    ]

    def add(quantization: str, method: str, result: dict[str, Any]) -> None:
        share = result["right"] / result["asked"]
        perplexity = np.exp(-result["said"].mean())
        drift = np.sqrt(np.square(result["said"] - baseline["said"]).mean())
        lines.append(
            f"| {quantization} | {method} | {result['right']} ({share:.1%}) | {perplexity:.4f} "
            f"| {drift:.4f} |"
        )
        print(lines[-1], f"{time.monotonic() - start:.0f} s", flush=True)
        table.write_text("\n".join(lines) + "\n")

    add("bfloat16", "", baseline)
    if kv_cache or activations:
        for name, engine in ((CACHES if kv_cache else {}) | (ROWS if activations else {})).items():
            add(name, "", evaluate_model(None, samples, held_out, seed, **engine))
        return
    with tempfile.TemporaryDirectory() as folder:
        for quantization, methods in WAYS.items():
            for method in methods:
                out = Path(folder) / f"{quantization}-{method}"
                quantise(out, quantization, method, calibration, seed)
                add(quantization, method, evaluate_model(str(out), samples, held_out, seed))


if __name__ == "__main__":
    typer.run(main)
