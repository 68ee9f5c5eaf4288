"""What quantisation costs models with trained weights:
`python tests/support/real_quantization.py FOLDER [NAME ...]`.

Writes the dequantised weights of each model of tests/real/models.toml into FOLDER and rounds them
by `quire quantize` in each way. For each, and for each dtype of the KV cache beside the dequantised
weights, it prints the perplexity of the first 2,048 tokens of some of Python's help topics, and the
mean KL divergence from the dequantised model, computed in float32. Folders that are there already
are used again. Needs `make real`.
"""

import gc
import pydoc_data.topics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.tests.support import real_models

NAMES = ("smollm2", "qwen-500m", "qwen-1500m")
NUM_TOKENS = 2048
PIECE = 512
TOPICS = ("exceptions", "import", "strings", "types", "compound")
WAYS = (
    ("int8", "rtn"),
    ("int8-weights", "rtn"),
    ("int8-weights-64", "rtn"),
    ("int4-32", "rtn"),
    ("int4-32", "gptq"),
    ("int4-32", "awq"),
    ("int4-32-zero", "rtn"),
    ("int4-32-zero", "gptq"),
)
CACHE_DTYPES = ("int8", "int4")


class Score(NamedTuple):
    perplexity: float
    divergence: float  # mean KL divergence from the reference, in nats


def write_dense(name: str, folder: Path) -> None:
    """Write a folder with the dequantised weights and the tokenizer of a GGUF file."""
    from quire.tests.support.real_reference import Reference

    reference = Reference(str(real_models.path_of(name)))
    folder.mkdir(parents=True)
    reference.write(folder)
    reference.tokenizer.save_pretrained(folder)


def quantize(dense: Path, out: Path, quantization: str, method: str) -> float:
    """Run `quire quantize`; returns its seconds."""
    start = time.monotonic()
    command = [sys.executable, "-m", "quire", "quantize", str(dense), str(out)]
    subprocess.run(
        [*command, "--quantization", quantization, "--method", method],
        check=True,
        stdout=sys.stderr,
    )
    return time.monotonic() - start


def measure(
    folder: Path, expected: list[np.ndarray], piece: int = PIECE, **options
) -> tuple[Score, list[np.ndarray]]:
    """Score a model on a text that no method calibrates on.

    Args:
        folder: the model.
        expected: the reference's log-probabilities; empty if this model is the reference.
        piece: number of tokens of the pieces of the text, which do not see each other.
        options: of the engine.

    Returns:
        The score, and the log-probabilities [T, V] of each piece.
    """
    from quire import LLM, SamplingParams

    text = "\n\n".join(pydoc_data.topics.topics[topic] for topic in TOPICS)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    pieces_TV = []
    token_logprobs: list[float] = []
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len=piece + 512,
        max_num_seqs=1,
        max_logprobs=-1,
        kv_cache_memory_bytes=256 << 20,
        **options,
    ) as llm:
        tokens = llm.get_tokenizer().encode(text)[:NUM_TOKENS]
        for start in range(0, NUM_TOKENS, piece):
            piece_tokens = tokens[start : start + piece]
            (output,) = llm.generate([piece_tokens], params, use_tqdm=False)
            logprobs_TV = output.prompt_logprobs.to_array()
            pieces_TV.append(logprobs_TV)
            token_logprobs += logprobs_TV[np.arange(piece - 1), piece_tokens[1:]].tolist()
    divergences = [
        float(np.sum(np.exp(p_V) * (p_V - q_V)))
        for p_TV, q_TV in zip(expected or pieces_TV, pieces_TV, strict=True)
        for p_V, q_V in zip(p_TV, q_TV, strict=True)
    ]
    score = Score(float(np.exp(-np.mean(token_logprobs))), float(np.mean(divergences)))
    return score, pieces_TV


def main() -> None:
    folder = Path(sys.argv[1])
    print(
        "| model | quantised | method | perplexity | increase over float32 | KL divergence "
        "| seconds to round |\n|---|---|---|---|---|---|---|"
    )
    for name in sys.argv[2:] or NAMES:
        dense = folder / name
        if not dense.exists():
            write_dense(name, dense)
            gc.collect()
        reference, expected = measure(dense, [])
        title = real_models.MODELS[name]["title"]
        print(f"| {title} | | | {reference.perplexity:.2f} | | | |", flush=True)
        for quantization, method in WAYS:
            out = folder / f"{name}-{quantization}-{method}"
            seconds = ""
            if not (out / "config.json").exists():
                seconds = f"{quantize(dense, out, quantization, method):.0f}"
            score, _ = measure(out, expected)
            print(
                f"| | `{quantization}` | {method} {row(score, reference)} | {seconds} |", flush=True
            )
        reference, expected = measure(dense, [], NUM_TOKENS)
        print(f"| | in one piece | | {reference.perplexity:.2f} | | | |", flush=True)
        for dtype in CACHE_DTYPES:
            score, _ = measure(dense, expected, NUM_TOKENS, kv_cache_dtype=dtype)
            print(f"| | `--kv-cache-dtype {dtype}` | {row(score, reference)} | |", flush=True)


def row(score: Score, reference: Score) -> str:
    increase = score.perplexity / reference.perplexity - 1
    return f"| {score.perplexity:.2f} | {increase:+.1%} | {score.divergence:.2g}"


if __name__ == "__main__":
    main()
