"""Compile whole steps for NVIDIA GPUs on a machine without one: `python -m tools.gpu.ahead
[llama-3-8b ...]`.

Compiles the engine's own step with the engine's own options for a GPU given by its description
(target.py). The table shows the compiled program's launches, memory, copies and traffic. Times are
predictions of the model in scripts/gpu/step_time.py, not measurements. Needs JAX's CUDA plugin,
whose compiler needs neither a GPU nor a driver; without a GPU XLA cannot autotune and takes default
kernels.
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
    """A step to compile: model, formats, batch and sampling."""

    model: str  # a key of SHAPES
    quant: str | None = None  # as in --quantization
    kv: str = "auto"  # as in --kv-cache-dtype
    batch: int = 64  # sequences that decode
    # Sampling with only temperature and min-p; otherwise with top-k, top-p and all other
    # parameters.
    plain: bool = True
    tensor: int = 1  # tensor parallelism
    rows: int | None = None  # tokens of a step with prompts; None: a decode step
    # Method of speculative decoding with DRAFTS tokens; all but ngram draft within the step.
    drafts: str | None = None

    @property
    def step_rows(self) -> int:
        return self.rows or self.batch * (1 + (DRAFTS if self.drafts else 0))

    @property
    def name(self) -> str:
        labels = [self.model, self.quant or published_format(self.model), f"batch {self.batch}"]
        labels += [f"{DRAFTS} drafts of {self.drafts}"] * (self.drafts is not None)
        labels += [f"{self.rows} rows"] * (self.rows is not None)
        labels += ["top-k, top-p"] * (not self.plain) + [f"KV {self.kv}"] * (self.kv != "auto")
        return ", ".join([*labels, *[f"tensor {self.tensor}"] * (self.tensor > 1)])


@dataclass(frozen=True)
class Result:
    """Figures of a case's compiled program, extrapolated to all layers; bytes are per GPU."""

    name: str
    graphs: int  # CUDA graphs
    launches_a_layer: float
    launches: float  # outside of layers
    executed: float  # launches of a step, with those in loops counted in every iteration
    outside: dict[str, int]  # launches outside of CUDA graphs, by kind
    sorts: float  # per step
    temporaries: int  # bytes of temporary buffers of the layers that were compiled
    copied: dict[str, float]  # bytes copied per layer: pages, experts, other weights
    moved: float  # bytes read and written
    needed: float  # bytes of weights and pages that any program must read
    seconds: float  # predicted
    share: float  # fraction of the predicted time that the needed bytes or operations would take
    spilled: int | None  # bytes of registers spilled by all kernels; None: not measured
    varies: list[str]  # reasons that the step is not batch-invariant


@dataclass(frozen=True)
class Failure:
    """A step that does not compile for the GPU."""

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
LENGTH = 1024  # cached tokens that a step reads of each sequence
MAX_LEN = 4096
ROWS = 2048  # maximum tokens in a step
DRAFTS = 4  # draft tokens per sequence in cases with speculative decoding


def published_format(model: str) -> str:
    """The format of the model's published weights."""
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
    """Two numbers of layers to compile, which differ by a whole period of the layer pattern."""
    return DEPTHS.get(model, (2, 3))


def measure(case: Case, target: str, spills: bool = False) -> Result:
    """Compile a case at two depths for a GPU; the difference gives the figures per layer."""
    from quire.model.planning.cost import DEVICES
    from quire.scripts.gpu.step_time import step_seconds

    from .shapes import SHAPES
    from .target import described

    hf = SHAPES[case.model]
    layers = hf["num_hidden_layers"]
    low_depth, high_depth = depths(case.model)
    device = DEVICES[target.partition("+")[0]]
    # Kernels are compiled once, with the first program, so only that one reports spills.
    with described(target, case.tensor):
        programs, variances = zip(
            *(compile_case(case, count, spills) for count in (low_depth, high_depth)), strict=True
        )
        needed, operations = minimum_work(case, layers)
    low, high = programs

    def whole(value) -> float:
        """Extrapolate a figure to all layers."""
        return value(low) + (layers - low_depth) * a_layer(value)

    def a_layer(value) -> float:
        return (value(high) - value(low)) / (high_depth - low_depth)

    moved = whole(lambda program: program.work.bytes)
    executed = whole(lambda program: program.work.launches)
    seconds = step_seconds(device, moved, operations, executed)
    roof_seconds = step_seconds(device, needed, operations, launches=0)
    launches = a_layer(lambda program: program.launches)
    return Result(
        case.name,
        high.graphs,
        launches,
        low.launches - low_depth * launches,
        executed,
        high.outside,
        whole(lambda program: program.sorts),
        high.temporaries,
        {
            kind: a_layer(lambda program, kind=kind: copied_bytes(program, kind))
            for kind in ("pages", "experts", "weights")
        },
        moved,
        needed,
        seconds,
        roof_seconds / seconds,
        low.spilled,
        sorted(frozenset().union(*variances)),
    )


def compile_case(case: Case, layers: int, spills: bool):
    """Compile a case with `layers` layers for the GPU of the current context.

    Returns (program, reasons that it is not batch-invariant).
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
    max_seqs = max(case.batch, 16)
    mesh = make_mesh(tensor=case.tensor) if case.tensor > 1 else None
    drafter, drafter_specs = make_drafter(case, config)
    pipeline = Pipeline(config, mesh, drafter)
    specs = abstract(config)
    pages = case.batch * width + 1
    drafts = DRAFTS if case.drafts else 0
    state = pipeline.abstract_state((pages,) * groups, page, max_seqs, drafts)
    weights = on_first_device(specs) if mesh is None else abstract_on_mesh(config, mesh, specs)
    weights = (
        weights
        if drafter_specs is None
        else SpeculativeWeights(weights, on_first_device(drafter_specs))
    )
    shape = StepShape.largest(max_seqs, ROWS, max_seqs, max_drafts=drafts)
    layouts = BatchBuilder(shape.with_cache(groups, page, MAX_LEN)).layouts
    decodes = case.rows is None
    rows = case.step_rows
    size = choose(layouts, rows, case.batch, rows if decodes else case.batch, decodes)
    state = on_first_device(state) if mesh is None else state
    (lowered,) = pipeline.lower(weights, state, layouts[size], is_plain=case.plain and decodes)
    shares = Shares(pipeline.kv_config, case, pages * page)
    return compile_program(lowered, shares.of, shares.turns, spills), pipeline.variance


def make_drafter(case: Case, config):
    """(drafter that runs within the step, specs of its weights), or (None, None)."""
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
        draft_config = replace(
            family_for(hf).config(hf, MAX_LEN), kv_cache_dtype=config.kv_cache_dtype
        )
        return DraftModel(draft_config, append_layers(config, draft_config), count), abstract(
            draft_config
        )
    heads = draft_heads.parse_heads(hf, (), config, case.drafts)
    drafter = FeatureDrafter(heads, append_layers(config, heads.model), count)
    return drafter, draft_heads.abstract(heads)


def on_first_device(tree):
    """Abstract arrays on the first device for a tree of shapes or specs."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from quire.sharding.spec import ArraySpec

    device_sharding = SingleDeviceSharding(jax.devices()[0])

    def placed(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=device_sharding)

    return jax.tree.map(placed, tree, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))


def page_size(case: Case) -> int:
    """Tokens per page; the kernel needs at least 32 with an eight-bit KV cache."""
    return 16 if case.kv == "auto" else 32


def attempt(case: Case, target: str, spills: bool) -> "Result | Failure":
    """The result of a case, or the failure if it does not compile, so that others still run."""
    import jax

    try:
        return measure(case, target, spills)
    except jax.errors.JaxRuntimeError as error:
        return Failure(case.name, str(error).splitlines()[0])


def alone(case: Case, target: str) -> Result | Failure:
    """`attempt` with spills, in a process of its own: within one process kernels that were compiled
    before would not be compiled again and report nothing.
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
    result = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    return Failure(**result) if "failed" in result else Result(**result)


def config_of(case: Case, layers: int):
    """The model's config with `layers` layers, without leading dense layers."""
    from quire.model.checkpoint.loader import family_for

    from .shapes import SHAPES

    full_config = SHAPES[case.model]
    hf = full_config | {"num_hidden_layers": layers}
    hf |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in full_config else {}
    hf |= (
        {"layer_types": full_config["layer_types"][:layers]} if "layer_types" in full_config else {}
    )
    config = family_for(hf).config(hf, MAX_LEN)
    return replace(config, quant=case.quant or config.quant, kv_cache_dtype=case.kv)


class Shares:
    """The fractions of arguments that a step reads, if each token chooses experts at random."""

    def __init__(self, config, case: Case, positions: int):
        from quire.model.planning.meshes import chosen

        self.config = config  # its layers include the drafter's layers that own pages
        self.case = case
        self.positions = positions
        layer = next((layer for layer in config.layers if layer.moe), None)
        self.experts = 1.0 if layer is None else chosen(layer, case.step_rows)
        self.blocks = 0.0 if layer is None else expert_blocks(layer.moe, case.step_rows)

    def of(self, argument: str, in_place: bool) -> float:
        """The fraction of an argument that a kernel reads; with `in_place`, what it reads and
        writes of an argument that it updates in place.
        """
        from quire.model.planning.cost import seen

        kind = kind_of(argument)
        if in_place:  # recurrent states are rewritten; of pages only the step's tokens are written
            return 2.0 if kind == "states" else 0.0
        if kind == "pages":
            layer = self.config.layers[int(re.findall(r"pages\[(\d+)\]", argument)[0])]
            return self.case.batch * seen(layer.attention, LENGTH) / self.positions
        return self.experts if kind == "experts" else 1.0

    def turns(self, arguments: set[str], inner: bool) -> float:
        """The iterations of a loop by its arguments: over blocks of experts' rows, over blocks of
        64 cached tokens, or over draft tokens (an inner loop; the outer one runs once).
        """
        if any(argument.startswith("weights.drafter") for argument in arguments):
            return DRAFTS if inner else 1.0
        kinds = {kind_of(argument) for argument in arguments}
        return self.blocks if "experts" in kinds else LENGTH / 64 if "pages" in kinds else 1.0


def expert_blocks(moe, rows: int) -> float:
    """The expected number of blocks of 16 rows, each of a single expert."""
    share = moe.top_k / moe.experts
    counts = range(1, rows + 1)
    chances = (math.comb(rows, n) * share**n * (1 - share) ** (rows - n) for n in counts)
    return moe.experts * sum(
        chance * -(-n // 16) for n, chance in zip(counts, chances, strict=True)
    )


def kind_of(argument: str) -> str:
    """The kind of a step's argument: pages, states, experts, weights or other."""
    if argument.startswith("state.pages"):
        return "pages"
    if argument.startswith("state.recurrent"):
        return "states"
    if re.search(r"\.moe\.(up|down)_", argument):
        return "experts"
    return "weights" if argument.startswith("weights") else "other"


def copied_bytes(program, kind: str) -> float:
    return sum(
        count for argument, count in program.work.copied.items() if kind_of(argument) == kind
    )


def minimum_work(case: Case, layers: int) -> tuple[float, float]:
    """Minimum (bytes of weights and pages, operations) of a step with all layers on one device."""
    from quire.scripts.gpu import step_time

    config = config_of(case, layers)
    prompts = case.rows is not None
    read, computed = step_time.least(
        config, case.step_rows, case.batch, LENGTH, prompts=prompts, tensor=case.tensor
    )
    more_read, more_computed = drafter_work(case, config)
    return read + more_read, computed + more_computed


def drafter_work(case: Case, config) -> tuple[float, float]:
    """Minimum (bytes, operations) of the drafter within the step: a pass over all tokens, and one
    per draft token.
    """
    from quire.model.planning.cost import layer_token_bytes
    from quire.sharding.spec import nbytes

    drafter, specs = make_drafter(case, config)
    if drafter is None or specs is None:
        return 0.0, 0.0
    head = specs.embed_VD if specs.head_VD is None else specs.head_VD
    layer_bytes = nbytes(specs.replace(embed_VD=None, head_VD=None))
    drafter_layers = drafter.kv_config.layers[len(config.layers) :]
    pages = (
        case.batch
        * LENGTH
        * sum(layer_token_bytes(layer.attention, config.kv_dtype) for layer in drafter_layers)
    )
    pass_bytes = layer_bytes + pages
    multiplied = (
        layer_bytes / 2 * (case.step_rows + DRAFTS * case.batch) + head.size * DRAFTS * case.batch
    )
    return pass_bytes * (1 + DRAFTS) + head.nbytes * DRAFTS, 2 * multiplied


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


def table_row(result: Result | Failure) -> list[str]:
    if isinstance(result, Failure):
        return [result.name, f"does not compile: {result.failed}"]
    outside = ", ".join(f"{count} {kind}" for kind, count in result.outside.items()) or "nothing"
    copies = ", ".join(
        f"{count / 1e6:,.0f} MB of {kind}" for kind, count in result.copied.items() if count >= 5e5
    )
    cells = [
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
    return cells if result.spilled is None else [*cells, f"{result.spilled:,}"]


def lines(results: Iterator[Result | Failure], spills: bool) -> Iterator[str]:
    """Yield the lines of a Markdown table as results become available."""
    headings = [*HEADINGS, *["bytes spilled"] * spills]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for result in results:
        yield f"| {' | '.join(table_row(result))} |"


def wanted(names: list[str]) -> list[Case]:
    """The cases with these names, or whose names contain them; all cases if there are no names."""
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
        "models", nargs="*", help="cases to compile, each by its name or a part of it (all)"
    )
    parser.add_argument(
        "--target",
        default="h200",
        help="GPU: h200, b200 or a100; with +flashinfer, use FlashInfer's kernels (h200)",
    )
    parser.add_argument(
        "--spills", action="store_true", help="also count the bytes of registers that kernels spill"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON per case instead of a table"
    )
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process runs nothing on a device
    # XLA dumps nothing for programs from the compilation cache.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from .target import APART, CARDS, missing

    if lacking := missing():
        parser.exit(2, f"{lacking}\n")
    if args.target.removesuffix("+flashinfer") not in CARDS:
        parser.error(
            f"--target is {args.target!r}; it can be {', '.join(CARDS)}, each with "
            "+flashinfer or without"
        )
    cases = wanted(args.models)
    if not cases:
        case_names = "; ".join(case.name for case in CASES)
        parser.error(f"no case is named {' or '.join(args.models)}; there are {case_names}")
    sys.path.append(str(APART))
    if args.spills and len(cases) > 1:
        results = (alone(case, args.target) for case in cases)
    else:
        results = (attempt(case, args.target, args.spills) for case in cases)
    for line in (
        (json.dumps(asdict(result)) for result in results)
        if args.json
        else lines(results, args.spills)
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
