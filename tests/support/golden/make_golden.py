"""Write the golden files, all or those named: `python -m tests.support.golden.make_golden [NAME
...]`.

Needs torch and transformers.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from quire.tests.support import reference

from .encoders import ENCODERS, texts_of
from .families import VARIANTS, Variant
from .folder import HERE, POSITIONS, prompts, write_folder

LEAST_LEAD = 3e-3  # rounding could change a best token with a smaller lead
STEADY = 1e-4  # models with larger float32 rounding errors are no useful reference
LEAST_KINDS = 12  # a sequence of fewer distinct tokens repeats itself


def make(variant: Variant, shapes: dict, seed: int) -> dict[str, np.ndarray] | None:
    """The golden arrays of one seed; None if greedy tokens are nearly tied or repeat themselves."""
    with tempfile.TemporaryDirectory() as folder:
        model = reference.load(write_folder(Path(folder), variant.config, shapes, seed))
    vocab_size = model.config.get_text_config().vocab_size
    prompt_ids = prompts(variant.prompts, vocab_size, seed)
    arrays = {}
    for number, ids in enumerate(prompt_ids):
        tokens, lead = reference.greedy(model, ids, variant.new_tokens)
        if variant.new_tokens and (lead < LEAST_LEAD or len(set(tokens)) < LEAST_KINDS):
            print(
                f"{variant.name} seed {seed}: lead {lead:.1e}, {len(set(tokens))} kinds", flush=True
            )
            return None
        arrays |= {
            f"prompt{number}": np.array(ids, np.int16),
            f"tokens{number}": np.array(tokens, np.int16),
        }
    sequence = prompt_ids[0] + arrays["tokens0"].tolist()
    if reference.float32_error(model, sequence) > STEADY:
        print(f"{variant.name} seed {seed}: unsteady", flush=True)
        return None
    rows = [position for position in POSITIONS if position < len(sequence)]
    arrays["logits"] = reference.logits(model, sequence)[rows]
    meta = {"seed": seed, "tensors": shapes}
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    return arrays


def make_encoder(variant: Variant, shapes: dict, seed: int = 1) -> dict[str, np.ndarray]:
    """The golden arrays of an encoder: a vector of each text by mean and by CLS pooling."""
    with tempfile.TemporaryDirectory() as folder:
        model = reference.load(write_folder(Path(folder), variant.config, shapes, seed))
    hidden = [reference.hidden(model, ids) for ids in texts_of(variant, seed)]
    meta = np.frombuffer(json.dumps({"seed": seed, "tensors": shapes}).encode(), np.uint8)
    return {
        "mean": np.stack([x.mean(0) for x in hidden]),
        "cls": np.stack([x[0] for x in hidden]),
        "meta": meta,
    }


def main(names: list[str]) -> None:
    for variant in ENCODERS:
        if not names or variant.name in names:
            arrays = make_encoder(variant, reference.tensor_shapes(variant))
            np.savez_compressed(HERE / f"{variant.name}.npz", allow_pickle=False, **arrays)
            print(f"{variant.name}: vectors spread {arrays['mean'].std():.2f}", flush=True)
    for variant in VARIANTS:
        if names and variant.name not in names:
            continue
        shapes = reference.tensor_shapes(variant)
        seed = 0
        arrays = None
        while arrays is None:
            seed += 1
            assert seed < 40, f"{variant.name}: no seed will do"
            arrays = make(variant, shapes, seed)
        np.savez_compressed(HERE / f"{variant.name}.npz", allow_pickle=False, **arrays)
        spread = arrays["logits"].std()
        tokens = arrays["tokens0"]
        print(
            f"{variant.name}: seed {seed}, logits spread {spread:.2f}, "
            f"{len(set(tokens.tolist()))} kinds",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
