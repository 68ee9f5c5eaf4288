"""The perplexity of quantised models with trained weights:
`python tests/support/real_quantization.py FOLDER [NAME ...]`.

Writes the dequantised weights of each model of tests/real/models.toml into FOLDER, rounds them by
`quire quantize` in each way, and prints the perplexity of the first 2,048 tokens of
`pydoc_data.topics` in pieces of 512, computed in float32. Folders that are there already are used
again. Needs `make real`.
"""

import gc
import pydoc_data.topics
import subprocess
import sys
import time
from pathlib import Path

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
    ("int4-32-zero", "gptq"),
    ("int4-32", "gptq"),
    ("int4-32", "awq"),
)


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


def perplexity(folder: Path) -> float:
    """Perplexity of a text that no method calibrates on."""
    from quire import LLM, SamplingParams

    text = "\n\n".join(pydoc_data.topics.topics[topic] for topic in TOPICS)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(
        str(folder),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=2,
        kv_cache_memory_bytes=128 << 20,
    ) as llm:
        tokens = llm.get_tokenizer().encode(text)[:NUM_TOKENS]
        pieces = [tokens[start : start + PIECE] for start in range(0, NUM_TOKENS, PIECE)]
        outputs = llm.generate(pieces, params, use_tqdm=False)
        logprobs = [
            step[token].logprob
            for piece, output in zip(pieces, outputs, strict=True)
            for step, token in zip(output.prompt_logprobs[1:], piece[1:], strict=True)
        ]
    return float(np.exp(-np.mean(logprobs)))


def main() -> None:
    folder = Path(sys.argv[1])
    print(
        "| model | format | method | perplexity | more than float32 | seconds to round "
        "|\n|---|---|---|---|---|---|"
    )
    for name in sys.argv[2:] or NAMES:
        dense = folder / name
        if not dense.exists():
            write_dense(name, dense)
            gc.collect()
        float32 = perplexity(dense)
        print(
            f"| {real_models.MODELS[name]['title']} | float32 | | {float32:.2f} | | |", flush=True
        )
        for quantization, method in WAYS:
            out = folder / f"{name}-{quantization}-{method}"
            seconds = ""
            if not (out / "config.json").exists():
                seconds = f"{quantize(dense, out, quantization, method):.0f}"
            rounded = perplexity(out)
            cost = f"{rounded:.2f} | {rounded / float32 - 1:+.1%}"
            print(f"| | `{quantization}` | {method} | {cost} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
