"""Compiles whole steps for NVIDIA GPUs on a machine without one: `python -m tools.gpu.ahead
[llama-3-8b ...]`.

It is the engine's own step with the engine's own options, for a card that is described (target.py).
The table says what the compiled program launches, keeps, copies and moves. Its times are not
measured: they are those of the model in scripts/gpu/step_time.py. Needs JAX's CUDA plugin, whose
compiler needs neither a card nor a driver; it cannot try, on a card, which of XLA's kernels are
faster, and takes the default ones.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Case:
    """A step: the model's shape, how its weights and pages are kept, and who asks for what."""

    model: str  # of SHAPES
    quant: str | None = None  # as in --quantization
    kv: str = "auto"  # as in --kv-cache-dtype
    batch: int = 64  # sequences that decode
    plain: bool = True  # nothing but a temperature and min-p; otherwise top-k, top-p and all others
    tensor: int = 1
    rows: int | None = None  # of a step that carries prompts
    # verifies DRAFTS tokens of each sequence; who drafts is in the step but for ngram
    drafts: str | None = None

    @property
    def step_rows(self) -> int:
        return self.rows or self.batch * (1 + (DRAFTS if self.drafts else 0))

    @property
    def name(self) -> str:
        found = [self.model, self.quant or stored(self.model), f"batch {self.batch}"]
        found += [f"{DRAFTS} drafts of {self.drafts}"] * (self.drafts is not None)
        found += [f"{self.rows} rows"] * (self.rows is not None)
        found += ["top-k, top-p"] * (not self.plain) + [f"KV {self.kv}"] * (self.kv != "auto")
        return ", ".join([*found, *[f"tensor {self.tensor}"] * (self.tensor > 1)])


@dataclass(frozen=True)
class Result:
    """What the compiled program of a case is like, for the whole model; bytes are those of one
    card.
    """

    name: str
    graphs: int
    launches_a_layer: float
    launches: float  # outside of layers
    executed: float  # launches of a step, those within loops at every turn
    outside: dict[str, int]  # of graphs
    sorts: float  # of a step
    temporaries: int  # of the layers that were compiled
    copied: dict[str, float]  # bytes a layer: of pages, of experts, of other weights
    moved: float  # bytes
    needed: float  # bytes of weights and pages that any program must read
    seconds: float  # by the model
    share: float  # of that time which the bytes that are needed, or the operations, would take
    spilled: int | None
    varies: list[str]  # why a row's bits may depend on its company


@dataclass(frozen=True)
class Failure:
    """A step that does not compile for this card."""

    name: str
    failed: str


CASES = (
    Case("llama-3-8b", batch=1),
    Case("llama-3-8b"),
    Case("llama-3-8b", batch=256),
    Case("llama-3-8b", "int8"),
    Case("llama-3-8b", "int8-weights"),
    Case("llama-3-8b", "int4"),
    Case("llama-3-8b", "fp8"),
    Case("llama-3-8b", "fp8-weights"),
    Case("llama-3-8b", kv="fp8"),
    Case("llama-3-8b", plain=False),
    Case("llama-3-8b", rows=2048),
    Case("llama-3-8b", tensor=8),
    Case("llama-3-8b", drafts="ngram"),
    Case("llama-3-8b", drafts="ngram", plain=False),
    Case("llama-3-8b", drafts="eagle3"),
    Case("llama-3-8b", drafts="draft_model"),
    Case("gemma-3-12b"),
    Case("qwen3-30b-a3b"),
    Case("qwen3-30b-a3b", "int8"),
    Case("qwen3-30b-a3b", "int4"),
    Case("qwen3-30b-a3b", "int4-128-zero"),
    Case("qwen3-30b-a3b", "fp8"),
    Case("gpt-oss-20b"),
    Case("deepseek-v3"),
    Case("qwen3-next-80b-a3b"),
    Case("granite-4.0-h-small"),
)
LENGTH = 1024  # of each sequence, of which the pages are read
MAX_LEN = 4096
ROWS = 2048  # the most of a step
DRAFTS = 4  # of each sequence, where a case has some


def stored(model: str) -> str:
    """The format of a shape's weights as they are published, where it is not bfloat16."""
    from .shapes import SHAPES

    return "mxfp4" if "quantization_config" in SHAPES[model] else "bf16"


DEPTHS = {
    "gpt-oss-20b": (2, 4),
    "gemma-3-12b": (6, 7),
    "deepseek-v3": (1, 2),
    "qwen3-next-80b-a3b": (4, 8),
    "granite-4.0-h-small": (10, 20),
}


def depths(model: str) -> tuple[int, int]:
    """Two numbers of layers whose programs differ by whole patterns of layers."""
    return DEPTHS.get(model, (2, 3))


def measure(case: Case, target: str, spills: bool = False) -> Result:
    """Compile a case at two depths for a described card. What they differ by is a layer."""
    from quire.model.planning.cost import DEVICES
    from quire.scripts.gpu.step_time import step_seconds

    from .shapes import SHAPES
    from .target import described

    hf = SHAPES[case.model]
    layers = hf["num_hidden_layers"]
    few, more = depths(case.model)
    device = DEVICES[target.partition("+")[0]]
    # kernels are compiled, and tell what they spill, with the first program alone
    with described(target, case.tensor):
        programs, variances = zip(
            *(compiled(case, count, spills) for count in (few, more)), strict=True
        )
        needed, operations = least(case, layers)
    low, high = programs

    def whole(value) -> float:
        """What a program of all layers has."""
        return value(low) + (layers - few) * a_layer(value)

    def a_layer(value) -> float:
        return (value(high) - value(low)) / (more - few)

    moved = whole(lambda program: program.work.bytes)
    executed = whole(lambda program: program.work.launches)
    seconds = step_seconds(device, moved, operations, executed)
    roof_seconds = step_seconds(device, needed, operations, launches=0)
    launches = a_layer(lambda program: program.launches)
    return Result(
        case.name,
        high.graphs,
        launches,
        low.launches - few * launches,
        executed,
        high.outside,
        whole(lambda program: program.sorts),
        high.temporaries,
        {
            kind: a_layer(lambda program, kind=kind: copied(program, kind))
            for kind in ("pages", "experts", "weights")
        },
        moved,
        needed,
        seconds,
        roof_seconds / seconds,
        low.spilled,
        sorted(frozenset().union(*variances)),
    )


def compiled(case: Case, layers: int, spills: bool):
    """The program of so many layers, for the card that is described, and why a row's bits may
    depend on its company.
    """
    from quire.model.checkpoint.placement import abstract_on_mesh
    from quire.model.weights import abstract
    from quire.serving.device.pipeline import Pipeline
    from quire.serving.device.step_shape import StepShape, choose
    from quire.serving.engine.batch_builder import BatchBuilder
    from quire.serving.speculative.on_device.drafting import SpeculativeWeights
    from quire.sharding.mesh import make_mesh

    from .program import compile_program

    config = config_of(case, layers)
    page = page_size(case)
    groups = len(config.windows)
    width = -(-MAX_LEN // page)
    most = max(case.batch, 16)
    mesh = make_mesh(tensor=case.tensor) if case.tensor > 1 else None
    drafter, own = drafter_of(case, config)
    pipeline = Pipeline(config, mesh, drafter)
    specs = abstract(config)
    pages = case.batch * width + 1
    drafts = DRAFTS if case.drafts else 0
    state = pipeline.abstract_state((pages,) * groups, page, most, drafts)
    weights = here(specs) if mesh is None else abstract_on_mesh(config, mesh, specs)
    weights = weights if own is None else SpeculativeWeights(weights, here(own))
    shape = StepShape.largest(most, ROWS, most, max_drafts=drafts)
    layouts = BatchBuilder(shape.with_cache(groups, page, MAX_LEN)).layouts
    decodes = case.rows is None
    rows = case.step_rows
    size = choose(layouts, rows, case.batch, rows if decodes else case.batch, decodes)
    state = here(state) if mesh is None else state
    (lowered,) = pipeline.lower(weights, state, layouts[size], is_plain=case.plain and decodes)
    shares = Shares(pipeline.kv_config, case, pages * page)
    return compile_program(lowered, shares.of, shares.turns, spills), pipeline.variance


def drafter_of(case: Case, config):
    """(what drafts in the step, the specs of its weights), None twice where nothing does."""
    from quire.model import draft_heads
    from quire.model.checkpoint.loader import family_for
    from quire.model.weights import abstract
    from quire.serving.speculative.on_device.draft_model import DraftModel
    from quire.serving.speculative.on_device.drafting import append_layers
    from quire.serving.speculative.on_device.eagle import FeatureDrafter

    from .shapes import DRAFTERS

    if case.drafts is None or case.drafts not in DRAFTERS:
        return None, None
    hf = DRAFTERS[case.drafts]
    count = len(config.layers)
    if case.drafts == "draft_model":
        own = replace(family_for(hf).config(hf, MAX_LEN), kv_cache_dtype=config.kv_cache_dtype)
        return DraftModel(own, append_layers(config, own), count), abstract(own)
    heads = draft_heads.parse_heads(hf, (), config, case.drafts)
    drafter = FeatureDrafter(heads, append_layers(config, heads.model), count)
    return drafter, draft_heads.abstract(heads)


def here(tree):
    """Shapes or specs of arrays on the first device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from quire.sharding.spec import ArraySpec

    where = SingleDeviceSharding(jax.devices()[0])

    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=where)

    return jax.tree.map(placed, tree, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))


def page_size(case: Case) -> int:
    """Positions of a page; the kernel takes pages of eight bits from 32 on."""
    return 16 if case.kv == "auto" else 32


def attempt(case: Case, target: str, spills: bool) -> "Result | Failure":
    """The result of a case, or why there is none: the others do not depend on it."""
    import jax

    try:
        return measure(case, target, spills)
    except jax.errors.JaxRuntimeError as error:
        return Failure(case.name, str(error).splitlines()[0])


def alone(case: Case, target: str) -> Result | Failure:
    """The same with what kernels spill, by a process of its own: a kernel is not compiled again in
    one that has it.
    """
    command = [
        sys.executable,
        "-m",
        "tools.gpu.ahead",
        case.name,
        "--target",
        target,
        "--spills",
        "--json",
    ]
    found = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return Failure(**found) if "failed" in found else Result(**found)


def config_of(case: Case, layers: int):
    """The model's configuration, cut to so many layers, all of which are alike."""
    from quire.model.checkpoint.loader import family_for

    from .shapes import SHAPES

    whole = SHAPES[case.model]
    hf = whole | {"num_hidden_layers": layers}
    hf |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in whole else {}
    hf |= {"layer_types": whole["layer_types"][:layers]} if "layer_types" in whole else {}
    config = family_for(hf).config(hf, MAX_LEN)
    return replace(config, quant=case.quant or config.quant, kv_cache_dtype=case.kv)


class Shares:
    """Which part of its arguments a step reads, if each token chooses its experts by chance."""

    def __init__(self, config, case: Case, positions: int):
        from quire.model.planning.meshes import chosen

        self.config = config  # the layers are all that own pages
        self.case = case
        self.positions = positions
        layer = next((layer for layer in config.layers if layer.moe), None)
        self.experts = 1.0 if layer is None else chosen(layer, case.step_rows)
        self.blocks = 0.0 if layer is None else expert_blocks(layer.moe, case.step_rows)

    def of(self, argument: str, in_place: bool) -> float:
        """Of an argument that a kernel gets as a whole; of one that it changes `in_place`, what it
        reads and writes.
        """
        from quire.model.planning.cost import seen

        kind = kind_of(argument)
        if in_place:  # states as a whole, and of pages only the rows of the step
            return 2.0 if kind == "states" else 0.0
        if kind == "pages":
            layer = self.config.layers[int(re.findall(r"pages\[(\d+)\]", argument)[0])]
            return self.case.batch * seen(layer.attention, LENGTH) / self.positions
        return self.experts if kind == "experts" else 1.0

    def turns(self, arguments: set[str], inner: bool) -> float:
        """Of a loop over blocks of experts' rows, or over blocks of 64 positions; or over drafts,
        around which is one of a single turn.
        """
        if any(argument.startswith("weights.drafter") for argument in arguments):
            return DRAFTS if inner else 1.0
        kinds = {kind_of(argument) for argument in arguments}
        return self.blocks if "experts" in kinds else LENGTH / 64 if "pages" in kinds else 1.0


def expert_blocks(moe, rows: int) -> float:
    """The expected number of blocks of sixteen rows of one expert."""
    share = moe.top_k / moe.experts
    each = range(1, rows + 1)
    chances = (math.comb(rows, n) * share**n * (1 - share) ** (rows - n) for n in each)
    return moe.experts * sum(chance * -(-n // 16) for n, chance in zip(each, chances, strict=True))


def kind_of(argument: str) -> str:
    """Pages, states, experts, weights, or something else of a step's arguments."""
    if argument.startswith("state.pages"):
        return "pages"
    if argument.startswith("state.recurrent"):
        return "states"
    if re.search(r"\.moe\.(up|down)_", argument):
        return "experts"
    return "weights" if argument.startswith("weights") else "other"


def copied(program, kind: str) -> float:
    return sum(
        count for argument, count in program.work.copied.items() if kind_of(argument) == kind
    )


def least(case: Case, layers: int) -> tuple[float, float]:
    """(bytes of weights and pages, operations) of one device's part of a step of all layers."""
    from quire.scripts.gpu import step_time

    config = config_of(case, layers)
    prompts = case.rows is not None
    read, computed = step_time.least(
        config, case.step_rows, case.batch, LENGTH, prompts=prompts, tensor=case.tensor
    )
    more_read, more_computed = of_drafter(case, config)
    return read + more_read, computed + more_computed


def of_drafter(case: Case, config) -> tuple[float, float]:
    """(bytes, operations) of what drafts in the step: once for all rows, and then once for each
    draft.
    """
    from quire.model.planning.cost import layer_token_bytes
    from quire.sharding.spec import nbytes

    drafter, specs = drafter_of(case, config)
    if drafter is None:
        return 0.0, 0.0
    head = specs.embed_VD if specs.head_VD is None else specs.head_VD
    rest = nbytes(specs.replace(embed_VD=None, head_VD=None))
    own = drafter.kv_config.layers[len(config.layers) :]
    pages = (
        case.batch
        * LENGTH
        * sum(layer_token_bytes(layer.attention, config.kv_dtype) for layer in own)
    )
    each = rest + pages
    multiplied = rest / 2 * (case.step_rows + DRAFTS * case.batch) + head.size * DRAFTS * case.batch
    return each * (1 + DRAFTS) + head.nbytes * DRAFTS, 2 * multiplied


HEADINGS = (
    "step",
    "graphs",
    "outside of them",
    "sorts",
    "launches a layer",
    "other launches",
    "temporaries",
    "copied a layer",
    "moved / needed",
    "predicted",
    "of the roof",
    "same bits",
)


def row(result: Result | Failure) -> list[str]:
    if isinstance(result, Failure):
        return [result.name, f"does not compile: {result.failed}"]
    outside = ", ".join(f"{count} {kind}" for kind, count in result.outside.items()) or "nothing"
    copies = ", ".join(
        f"{count / 1e6:,.0f} MB of {kind}" for kind, count in result.copied.items() if count >= 5e5
    )
    found = [
        result.name,
        str(result.graphs),
        outside,
        f"{result.sorts:.0f}",
        f"{result.launches_a_layer:.0f}",
        f"{result.launches:.0f}",
        f"{result.temporaries / 1e6:,.0f} MB",
        copies or "nothing",
        (
            f"{result.moved / 1e9:.1f} / {result.needed / 1e9:.1f} GB, "
            f"{result.moved / result.needed:.2f}"
        ),
        f"{result.seconds * 1e3:,.2f} ms",
        f"{result.share:.0%}",
        "no" if result.varies else "yes",
    ]
    return found if result.spilled is None else [*found, f"{result.spilled:,}"]


def lines(results: Iterator[Result | Failure], spills: bool) -> Iterator[str]:
    """A table in Markdown, line by line as the results come."""
    headings = [*HEADINGS, *["bytes spilled"] * spills]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for result in results:
        yield f"| {' | '.join(row(result))} |"


def wanted(names: list[str]) -> list[Case]:
    """The cases of these names, or whose names contain them; all without names."""
    if not names:
        return [*CASES]
    exact = {case.name for case in CASES}.intersection(names)
    return [
        case
        for case in CASES
        if any(case.name == name or name not in exact and name in case.name for name in names)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "models", nargs="*", help="these cases only, each by its name or a part of it"
    )
    parser.add_argument(
        "--target", default="h200", help="h200, b200, a100, or a100+flashinfer with that (h200)"
    )
    parser.add_argument(
        "--spills", action="store_true", help="count the bytes that kernels spill, too"
    )
    parser.add_argument(
        "--json", action="store_true", help="a line of JSON for each case, not a table"
    )
    asked = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # the process itself computes nothing
    # of a program that is not compiled XLA tells nothing
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from .target import APART, CARDS, missing

    if lacking := missing():
        parser.exit(2, f"{lacking}\n")
    if asked.target.removesuffix("+flashinfer") not in CARDS:
        parser.error(
            f"--target is {asked.target!r}; it can be {', '.join(CARDS)}, each with "
            "+flashinfer or without"
        )
    cases = wanted(asked.models)
    if not cases:
        known = "; ".join(case.name for case in CASES)
        parser.error(f"no case is named {' or '.join(asked.models)}; there are {known}")
    sys.path.append(str(APART))
    if asked.spills and len(cases) > 1:
        results = (alone(case, asked.target) for case in cases)
    else:
        results = (attempt(case, asked.target, asked.spills) for case in cases)
    for line in (
        (json.dumps(asdict(result)) for result in results)
        if asked.json
        else lines(results, asked.spills)
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
