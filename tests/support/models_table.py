"""docs/models.md: every supported `model_type`, its features, its tests and the config values that
it rejects.

`python tests/support/models_table.py > docs/models.md` writes the page. The features are the first
paragraph of a family's module docstring; the rejected values are recorded while the family reads
the tiny and the published configurations of the tests.
"""

import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from quire.model import families
from quire.model.checkpoint.published import split_quantization
from quire.model.families import FAMILIES, UNSUPPORTED, wrapper
from quire.model.families.config_keys import Keys
from quire.model.multimodal import TOWER_KINDS
from quire.tests.support.golden.encoders import ENCODERS
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.published import PUBLISHED
from quire.tests.support.published_moe import PUBLISHED_MOE
from quire.tests.support.published_more import PUBLISHED_MORE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TINY_CONFIGS = {variant.name: variant.config for variant in (*VARIANTS, *ENCODERS)}
PUBLISHED_CONFIGS = {
    name: published.config
    for name, published in (PUBLISHED | PUBLISHED_MOE | PUBLISHED_MORE).items()
}
OWN = "quill"  # the model type that transformers lacks
HEAD = """# Models

The supported values of `model_type` in `config.json`, with the features of each architecture beyond
a plain decoder. The encoders (`bert`, `modernbert`, `roberta`, `xlm-roberta`, and `gemma3_text`
with `use_bidirectional_attention`) compute embeddings, classes and scores of text pairs
([ranking.md](ranking.md)); all other models generate text. Of multimodal models the text model is
loaded, and the log lists the tensors that are skipped; `gemma3`, `gemma4`, `mistral3`,
`qwen3_5`, `qwen3_5_moe`, `qwen3_vl` and `qwen3_vl_moe` read images too ([images.md](images.md)).

Each model is tested in one or two ways:

- **tiny**: random models with these configurations are compared with `transformers` in float32:
  logits within 2e-4 and 64 identical greedy tokens, with chunked prefill, pages of 8 and 16 tokens,
  alone and in a batch of unequal lengths. Encoders: embeddings within 2e-5 at length 1.
  `make check` compares with stored results (`tests/support/golden/`), `make parity` with
  `transformers` itself on fresh random weights.
- **published**: the published configuration is read, and the number of parameters and the names and
  shapes of the tensors equal those of `transformers`. Weights of large models have not been loaded.

**Refused** lists config keys for which any other value is an error that names the key. A key that
the family does not read and that could change the result is an error too
(`model/families/config_keys.py`).

`python tests/support/models_table.py > docs/models.md` writes this page, and a test compares it
with the code.
"""


def kinds(hf: dict) -> Iterator[str]:
    """The model types of a configuration: its own, and that of its text model."""
    yield hf["model_type"]
    if isinstance(text_config := hf.get("text_config"), dict):
        yield text_config.get("model_type", wrapper.TEXT_TYPES[hf["model_type"]])


def by_kind(configs: dict[str, dict]) -> dict[str, list[str]]:
    """The names of configurations by model type."""
    names_by_kind = defaultdict(list)
    for name, hf in configs.items():
        for kind in kinds(hf):
            names_by_kind[kind].append(name)
    return names_by_kind


def refusals() -> dict[str, dict[str, tuple]]:
    """By model type: keys with rejected values, and the values that each key may have."""
    keys_by_kind: dict[str, dict[str, tuple]] = defaultdict(dict)
    refuse = Keys.refuse

    def note(self: Keys, name: str, *harmless):
        keys_by_kind[self.hf["model_type"]][name] = harmless
        return refuse(self, name, *harmless)

    with patch.object(Keys, "refuse", note):
        for hf in (*TINY_CONFIGS.values(), *PUBLISHED_CONFIGS.values()):
            module(hf["model_type"]).config(split_quantization(hf)[0])
    return keys_by_kind


def module(kind: str):
    return importlib.import_module(FAMILIES[kind], families.__name__)


def may_be(values: tuple) -> str:
    return " or ".join(f"`{value!r}`" for value in values) or "`null`"


def row(kind: str, tiny: list[str], published: list[str], refused: dict[str, tuple]) -> str:
    about = " ".join((module(kind).__doc__ or "").split("\n\n")[0].split()).rstrip(".")
    if FAMILIES[kind] == ".wrapper":
        rest = "with images" if kind in TOWER_KINDS else "the rest is left out"
        about = f"its text model, as a rule `{wrapper.TEXT_TYPES[kind]}`; {rest}"
    tests = [f"tiny: {', '.join(tiny)}"] if tiny else []
    tests += [f"published: {', '.join(published)}"] if published else []
    keys = [f"`{name}` other than {may_be(values)}" for name, values in sorted(refused.items())]
    return f"| `{kind}` | {about} | {'; '.join(tests) or 'not by itself'} | {', '.join(keys)} |".replace(
        "|  |", "| |"
    )


def page() -> str:
    tiny = by_kind(TINY_CONFIGS)
    published = by_kind(PUBLISHED_CONFIGS)
    refused = refusals()
    rows = [
        row(kind, tiny.get(kind, []), published.get(kind, []), refused.get(kind, {}))
        for kind in sorted(FAMILIES)
    ]
    unsupported_rows = [f"| `{kind}` | {reason} |" for kind, reason in sorted(UNSUPPORTED.items())]
    return "\n".join(
        [
            HEAD,
            "| `model_type` | what it brings | how it is tested | refused |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Refused as a whole",
            "",
            "Any other `model_type` is refused with a list of these. Of some the error says why:",
            "",
            "| `model_type` | why |",
            "|---|---|",
            *unsupported_rows,
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
