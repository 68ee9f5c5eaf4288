"""How far the engines' distributions are from float32 on the same GGUF file."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire.model.checkpoint import hub
from quire.model.text.tokenizer import Tokenizer

from . import turns
from .work import Workload

REFERENCE = "transformers"
NUM_TOKENS = 256
TOPICS = ("exceptions", "import", "strings")


def text_tokens(file: Path) -> list[int]:
    """Tokens of some of Python's help topics."""
    text = "\n\n".join(pydoc_data.topics.topics[topic] for topic in TOPICS)
    return Tokenizer(hub.resolve(str(file))).encode(text)[:NUM_TOKENS]


def measure(
    engines: list[str], work: Workload, bench: turns.Bench, note: Callable[[str], None]
) -> dict[str, float | None]:
    """Mean KL divergence in nats of each engine from transformers in float32, which has the file's
    dequantised weights. None if an engine, or the reference, fails.
    """
    tokens = text_tokens(Path(bench.settings.file))
    folder = bench.place / "scores"
    folder.mkdir(exist_ok=True)
    expected_TV = None
    divergences: dict[str, float | None] = dict.fromkeys(
        name for name in engines if name != REFERENCE
    )
    for engine in [REFERENCE, *divergences]:
        out = folder / f"{engine}.npy"
        try:
            turns.score(engine, work, tokens, out, bench)
        except turns.EngineFailure as error:
            note(f"scores: {engine} failed: {error}")
            if engine == REFERENCE:
                return divergences
            continue
        logprobs_TV = np.load(out)
        out.unlink()
        if expected_TV is None:
            expected_TV = logprobs_TV
        else:
            divergences[engine] = value = divergence(expected_TV, logprobs_TV)
            note(f"{engine}: KL divergence {value:.2g}")
    return divergences


def divergence(expected_TV: np.ndarray, actual_TV: np.ndarray) -> float:
    """Mean KL divergence of `actual` from `expected`, over the tokens that both have: some engines
    pad the vocabulary.
    """
    V = min(expected_TV.shape[-1], actual_TV.shape[-1])
    p_TV = expected_TV[:, :V].astype(np.float64)
    q_TV = actual_TV[:, :V].astype(np.float64)
    return float(np.mean(np.sum(np.exp(p_TV) * (p_TV - q_TV), axis=-1)))
