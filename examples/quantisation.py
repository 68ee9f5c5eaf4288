"""Quantise a model to four bits and compare it with the original.

Prints for both models the size of the weights, the mean log-probability of a text (nearer to 0 is
better), and the answer to a question.

    python examples/quantisation.py [FOLDER]      # without FOLDER: the bundled model
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import quire
from quire import LLM, SamplingParams

TEXT = "Once upon a time, there was a little fox. The fox lived in a small house near the forest."
QUESTION = [{"role": "user", "content": "Sort: 52 31 90"}]


def show(name: str, folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    llm = LLM(str(folder))
    (scored,) = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [next(iter(entry.values())).logprob for entry in scored.prompt_logprobs[1:]]
    (answer,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    print(
        f"{name:10} {size / 2**20:5.1f} MiB   {sum(logprobs) / len(logprobs):6.3f}   "
        f"{answer.outputs[0].text}"
    )


source = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(quire.__file__).parent / "model" / "quill"
with tempfile.TemporaryDirectory() as place:
    rounded = Path(place) / "int4"
    command = [
        sys.executable,
        "-m",
        "quire",
        "quantize",
        str(source),
        str(rounded),
        "--quantization",
        "int4-32",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    show("original", source)
    show("four bits", rounded)
