"""From options to a ready engine: model, tokenizer, the size of the cache, and every step
compiled.
"""

import atexit
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..model import expert_copies
from ..model.checkpoint import embedder, hub, loader
from ..model.checkpoint.adapter_targets import add_adapter_stacks, list_targets
from ..model.checkpoint.adapters import stack_rank
from ..model.checkpoint.key_biases import skip_biased_layers
from ..model.checkpoint.placement import Placement
from ..model.config import ACTIVATIONS, ModelConfig, ModelError
from ..model.mixers.attention import SHIFT_POSITIONS
from ..model.multimodal import Multimodal, text_replacement, with_images
from ..model.planning.cost import weight_bytes
from ..model.text.tokenizer import Tokenizer, find_tokenizer
from ..model.weights import ModelWeights
from ..ops import native
from ..ops.attention import page_dtype
from ..ops.cache_folder import home
from ..ops.linear.cpu import PackedWeight
from ..ops.model_kernels import kernels_for_model
from ..ops.native.kernel_names import ADAPTER
from ..sharding.mesh import Mesh
from .adapter_store import AdapterStore
from .api.options import DISK, HOST, PARALLEL, EngineOptions, SizedOptions
from .api.params import MAX_LOGPROBS
from .cache.disk_cache import PAGE_FORMAT, DiskCache
from .cache.host_cache import HostCache
from .cache.page_table import PageTable
from .defaults import generation_folder, model_defaults
from .device.mesh import mesh_of, placement_of
from .device.step_shape import Size, StepShape
from .engine.cache_size import (
    cache_budget,
    check_memory,
    claim_memory,
    held_bytes,
    size_cache,
    usable_memory,
    whole_page_bytes,
    working_bytes,
)
from .engine.engine import Engine
from .engine.runner import Runner
from .media_reader import MediaReader
from .multihost.leader import Follower, Leader
from .multihost.rendezvous import join
from .observe.trace import Trace
from .speculative.on_device.drafting import SpeculativeWeights
from .speculative.on_device.loading import DraftSource, draft_folder, load_drafter
from .vision import explain_text_only, media_bytes, media_of, multimodal_of, tower_of

log = logging.getLogger("quire")

SAMPLE = 1 << 16  # bytes at each end of a file that tell it from another


def make_engine(
    options: EngineOptions, progress: Callable[[str], None] = lambda note: None
) -> Engine:
    """Load, size and compile; `progress` hears one short note a stage."""
    if options.process_id:
        raise ModelError(
            f"process_id is {options.process_id}, and only process 0 has an engine that can be "
            "asked; let the others follow it: `quire serve`, or quire.follow(), with the same "
            "options"
        )
    use_compile_cache()
    claim_memory(options)
    folder = folder_of(options)
    trace = make_trace(options.trace)
    progress("reading config")
    config = config_of(folder, options)
    multimodal = multimodal_of(folder, options)
    if multimodal is None:
        explain_text_only(folder, options)
    if config.file_format is not None:
        log.info("%s is a GGUF file in %s", options.model, config.file_format)
    if config.encodes and options.speculation is not None:
        raise ModelError(
            "speculative_config is given, and this model makes vectors or classes: it has no use "
            "for drafts"
        )
    defaults = model_defaults(folder, options, config.max_len)
    read_tokenizer = tokenizer_reader(folder, options)
    with joined(options, folder, progress) as hosts:
        built = make_runner(options, folder, config, hosts, progress, read_tokenizer, multimodal)
    runner = built.runner
    tokenizer = read_tokenizer()
    if multimodal is not None and tokenizer is not None:
        tokenizer.replacement = text_replacement(multimodal.layout, tokenizer.token_text)
    if isinstance(hosts, Leader):
        runner.leader = hosts
        atexit.register(hosts.close)
    caching = options.enable_prefix_caching and not config.encodes
    if caching and runner.config.state_layers and not runner.state.snapshots:
        caching = False
        log.info(
            "prompts that begin alike share nothing: a state that layers keep has no room "
            "twice in the cache"
        )
    tables = [
        PageTable(
            runner.num_pages,
            options.block_size,
            runner.config.windows,
            caching,
            host_cache,
            replica,
        )
        for replica, host_cache in enumerate(built.host_caches)
    ]
    seed = options.seed
    queued = options.max_queued_requests
    vectors = embedder_of(options, folder, built.max_len - (not config.encodes))
    engine = Engine(
        runner,
        tokenizer,
        tables,
        built.max_len,
        seed,
        queued,
        embedder=vectors,
        defaults=defaults.requests,
        chat_defaults=defaults.chat,
        speculation=options.speculation,
        adapters=adapter_store(options, folder, runner.config),
        page_identity=built.page_identity,
        media_reader=built.media_reader,
    )
    if trace is not None:
        engine.observers.append(trace)
    return engine


def folder_of(options: EngineOptions) -> Path:
    """The model's folder, fetched if it must be."""
    files = hub.WITHOUT_WEIGHTS if options.load_format == "dummy" else hub.FILES
    return hub.resolve(options.model, files, options.revision, options.download_dir)


def embedder_of(options: EngineOptions, folder: Path, max_tokens: int) -> embedder.Embedder:
    """How texts become vectors: as the model's folder says, but for what the options do.

    `max_tokens` is how many tokens of a text fit. `max_model_len` takes the place of the folder's
    own length.
    """
    config = embedder.read(folder) or embedder.Embedder()
    if config.max_tokens is not None:
        named = config.max_tokens if options.max_model_len is None else max_tokens
        config = replace(config, max_tokens=min(named, max_tokens))
        log.info(
            "texts to embed are truncated to %d tokens, as the model's folder says; max_model_len "
            "sets another length",
            config.max_tokens,
        )
    return config if options.pooling is None else replace(config, pooling=options.pooling)


def tokenizer_reader(folder: Path, options: EngineOptions) -> Callable[[], Tokenizer | None]:
    """A function that returns the tokenizer, and reads it when it is first called.

    The tokenizer is that of the model or of the folder that the options name. That its files exist
    is checked at once. `generation_config` names its end tokens too.
    """
    if options.skip_tokenizer_init:
        return lambda: None
    if options.tokenizer:
        folder = hub.resolve(
            options.tokenizer, hub.WITHOUT_WEIGHTS, download_dir=options.download_dir
        )
    find_tokenizer(folder)
    is_named = options.generation_config not in ("auto", "vllm")
    generation = generation_folder(folder, options) if is_named else None
    return cache(partial(Tokenizer, folder, generation, options.hf_overrides))


def config_of(folder: Path, options: EngineOptions, max_len: int | None = None) -> ModelConfig:
    """The model as it is to be."""
    wish = options.max_model_len
    length = max_len if max_len is not None else None if wish in (None, -1) else wish
    config = loader.read_config(
        folder,
        options.dtype,
        length,
        options.quantization,
        options.kv_cache_dtype,
        options.hf_overrides,
        options.kv_cache_dtype_skip_layers,
    )
    if options.activation_dtype not in ACTIVATIONS:
        raise ModelError(
            f"activation_dtype is {options.activation_dtype!r}; it can be "
            f"{' or '.join(ACTIVATIONS)}"
        )
    config = replace(config, activation_dtype=options.activation_dtype)
    if (multimodal := multimodal_of(folder, options)) is not None:
        config = with_images(config, multimodal)
    if options.load_format != "dummy":
        config = skip_biased_layers(folder, config)
    if config.encodes and config.classes is None and options.pooling is not None:
        config = replace(config, pooling=options.pooling)
    sharing = (
        options.expert_parallel_size * options.context_parallel_size * options.data_parallel_size
    )
    expert_copies.check(config, options.expert_redundancy, sharing, options.pipeline_parallel_size)
    return expert_copies.with_redundancy(config, options.expert_redundancy)


@contextmanager
def joined(
    options: EngineOptions, folder: Path, progress: Callable[[str], None]
) -> Iterator[Leader | Follower | None]:
    """Together with the other processes, if there are any, who hear if this one cannot go on."""
    hosts = join(options, folder, progress)
    try:
        yield hosts
    except BaseException as error:
        if hosts is not None:
            hosts.abandon(str(error) or type(error).__name__)
        raise


class Made(NamedTuple):
    """A runner with all that it needs compiled, and what an engine must know besides."""

    runner: Runner
    max_len: int
    host_caches: list[HostCache | None]  # of each replica
    page_identity: Callable[[], tuple[bytes, bytes]]  # of the weights as they lie on disk now
    media_reader: MediaReader | None = None


def make_runner(
    options: EngineOptions,
    folder: Path,
    config: ModelConfig,
    hosts: Leader | Follower | None = None,
    progress: Callable[[str], None] = lambda note: None,
    while_compiling: Callable[[], object] = lambda: None,
    multimodal: Multimodal | None = None,
) -> Made:
    """Weights, state and compiled steps; of several processes each makes the same, with its own
    part in it.
    """
    sized = options.on(jax.default_backend())
    kernels = native.prepare(
        (*kernels_of(config), *([ADAPTER] if options.enable_lora else ())),
        lambda built, total: progress(f"first start: compiled {built} of {total} kernels"),
    )
    shape = step_shape(sized, config)
    if multimodal is not None:
        shape = replace(
            shape,
            reads_media=True,
            media_axes=multimodal.num_axes,
            sees_spans=multimodal.sees_spans,
        )
    mesh = mesh_of(options, config)
    placement = placement_of(options, config, mesh)
    source = load_drafter(
        options, folder, config, min(config.max_len, sized.max_positions(config.max_len)), mesh
    )
    if source is not None and source.load is not None:
        native.prepare(kernels_of(source.config)).result()
    load_weights = partial(load, folder, config, placement, options, source)
    weights = None
    tower_bytes = 0 if multimodal is None else media_bytes(config, multimodal.tower)
    check_memory(options, weight_bytes(config, loader.weight_specs(config)) + tower_bytes)
    budget = cache_budget(options)
    if budget is None:  # what the weights and a step leave
        progress("loading weights")
        weights = load_weights()
        progress("measuring a step")
        drafter = None if source is None else source.drafter
        used_bytes = held_bytes(weights) + working_bytes(
            config, weights, shape, options.block_size, mesh, drafter
        )
        budget = max(0, usable_memory(options) - used_bytes - tower_bytes)
    if hosts is not None:
        budget = hosts.agree_on_budget(budget, device_and_kernels())
    max_len, num_pages = size_cache(
        config, sized, budget, mesh, None if source is None else source.drafter
    )
    if options.max_model_len == -1:
        config = config_of(folder, options, max_len)
        source = load_drafter(options, folder, config, max_len, mesh)
    drafter = None if source is None else source.drafter
    if weights is None:
        progress("loading weights")
        weights = load_weights()
    replicas = range(options.data_parallel_size)
    paged = config if drafter is None else drafter.kv_config
    page_identity = partial(page_identity_of, folder, paged, options)
    host_caches = [
        make_host_cache(paged, options, len(num_pages), page_identity(), mesh, replica)
        for replica in replicas
    ]
    media_encoder = media_reader = None
    if multimodal is not None:
        progress("loading the vision tower")
        native.prepare(kernels_of(tower_of(config, multimodal.tower).model)).result()
        media_encoder, media_reader = media_of(folder, config, multimodal, max_len, options)
    runner = Runner(
        config,
        weights,
        shape,
        num_pages,
        options.block_size,
        max_len,
        host_caches[0] is not None,
        load_weights,
        mesh,
        options.expert_rebalance_steps,
        drafter,
        sized.max_steps_per_launch if can_fuse_steps(sized, config) else 1,
        media_encoder,
    )

    def note(size: Size) -> None:
        if options.require_invariance and runner.pipeline.variance:
            raise ModelError(
                (
                    "require_invariance is set, and here a request's bits may depend on the rest "
                    "of its batch: "
                )
                + "; ".join(sorted(runner.pipeline.variance))
            )
        step = f"the step for {size.rows} rows"
        progress(
            f"first start: compiling kernels and {step}"
            if kernels.result()
            else f"compiling {step}"
        )

    runner.warm_up(note, while_compiling)
    if runner.pipeline.variance:
        reasons = "; ".join(sorted(runner.pipeline.variance))
        log.info("a request's last bits may depend on the rest of its batch: %s", reasons)
    return Made(runner, max_len, host_caches, page_identity, media_reader)


def step_shape(options: SizedOptions, config: ModelConfig) -> StepShape:
    """What the steps of an engine are compiled for, but for its cache."""
    chosen = options.speculation
    return StepShape.largest(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        max(options.max_num_seqs, 16),
        num_logprobs=config.vocab_size
        if options.max_logprobs == -1
        else max(options.max_logprobs, MAX_LOGPROBS),
        whole_prompts=config.encodes,
        max_drafts=0 if chosen is None else chosen.num_speculative_tokens,
        needs_draft_prefill=chosen is not None and chosen.traits.needs_draft_prefill,
        num_adapters=options.max_loras if options.enable_lora else 0,
    )


def can_fuse_steps(options: SizedOptions, config: ModelConfig) -> bool:
    """Whether several decode steps are one program: where the host takes as long as a step of a
    small model.
    """
    alone = all(getattr(options, name) == 1 for name in (*PARALLEL.values(), "num_processes"))
    is_plain = not (
        options.speculation or config.encodes or config.state_layers or options.weights_host_bytes
    )
    return alone and is_plain and jax.default_backend() == "cpu"


def adapter_store(options: EngineOptions, folder: Path, config: ModelConfig) -> AdapterStore | None:
    """What reads adapters, where they are served."""
    if not options.enable_lora:
        return None
    if not (targets := list_targets(config, options.adapted_modules)):
        raise ModelError(
            f"enable_lora is set, and no weight of {config.family} models takes adapters"
        )
    max_adapters = options.max_cpu_loras or options.max_loras
    return AdapterStore(folder, config, targets, options.max_lora_rank, max_adapters)


def kernels_of(config: ModelConfig) -> tuple[str, ...]:
    """The native kernels that a model will call."""
    experts = tuple({layer.moe.quant for layer in config.layers if layer.moe})
    groups = () if config.stored is None or config.stored.rounds_head else config.stored.groups
    # rows of a step, of encoders
    kv_dtypes = {config.layer_kv_dtype(index) for index in config.kv_layers} or {config.dtype}
    pages = {page_dtype(jnp.dtype(dtype)).name for dtype in kv_dtypes}
    stored = tuple(group.quant for group in groups)
    return kernels_for_model(
        config.dtype, config.quant, pages, experts, stored, config.activation_dtype == "int8"
    )


def load(
    folder: Path,
    config: ModelConfig,
    placement: Placement,
    options: EngineOptions,
    source: DraftSource | None = None,
) -> ModelWeights | SpeculativeWeights:
    """The weights, and where the copies of experts lie; with those of the drafter, where one drafts
    in the step.
    """
    weights = loader.load(
        folder, config, placement, load_format=options.load_format, cached=options.weight_cache
    )
    check_rounding(weights, config, placement)
    weights = expert_copies.with_first_placement(weights, config, placement.mesh)
    if options.enable_lora:
        slots = options.max_loras
        rank = stack_rank(options.max_lora_rank)
        weights = add_adapter_stacks(
            weights, config, slots, rank, placement.mesh, options.adapted_modules
        )
    return (
        weights
        if source is None
        else SpeculativeWeights(weights, None if source.load is None else source.load())
    )


def check_rounding(weights: ModelWeights, config: ModelConfig, placement: Placement) -> None:
    """Refuse int8 activations that no product would use."""
    nodes = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, PackedWeight))
    if config.activation_dtype == "auto" or any(
        isinstance(node, PackedWeight) and node.int8_activations for node in nodes
    ):
        return
    if placement.mesh is not None:
        reason = "the weights lie on several devices, which have no kernels for that; leave it out"
    elif not native.serves():
        reason = "the native kernels, which alone can do that, are not in use here; leave it out"
    else:
        reason = (
            "no weight of the model has a format with int8 activations on request "
            "(docs/quantisation.md); leave it out, or choose a quantization such as int4-64"
        )
    raise ModelError(f"activation_dtype is {config.activation_dtype!r}, and {reason}")


def make_trace(file: str | None) -> Trace | None:
    try:
        return None if file is None else Trace(Path(file).expanduser())
    except OSError as error:
        raise ModelError(f"trace is {file!r}: {error.strerror}") from None


def make_host_cache(
    config: ModelConfig, options: EngineOptions, groups: int, page_identity: tuple[bytes, bytes],
    mesh: Mesh | None = None, replica: int = 0,
) -> HostCache | None:  # fmt: skip
    """Host memory and disk for pages of so many groups that the cache has no room for, where there
    are to be any.

    Replicas have an equal share of both.
    """
    sizes = [whole_page_bytes(config, group, options.block_size, mesh) for group in range(groups)]
    host = options.kv_cache_host_bytes
    if host is None:
        host = HOST if options.kv_cache_disk else 0
    host //= options.data_parallel_size
    if options.kv_cache_disk is None:
        return HostCache(sizes, host, None, *page_identity) if host else None
    if host < max(sizes):
        raise ModelError(
            f"kv_cache_host_bytes is {host} a replica; the way to the disk leads through host "
            "memory, which must hold a page, and a snapshot of states if there are any: "
            f"{max(sizes)} bytes at least"
        )
    path = Path(options.kv_cache_disk).expanduser()
    try:
        room = DISK if options.kv_cache_disk_bytes is None else options.kv_cache_disk_bytes
        folder = path if options.data_parallel_size == 1 else path / f"replica-{replica}"
        disk = DiskCache(folder, room // options.data_parallel_size)
    except OSError as error:
        raise ModelError(f"kv_cache_disk is {str(path)!r}: {error.strerror}") from None
    return HostCache(sizes, host, disk, *page_identity)


def device_and_kernels() -> str:
    """What computes here, and by whose code."""
    device = jax.local_devices()[0]
    kernels = (
        f"{native.instruction_set()} {native.build.source_hash()}" if native.serves() else "XLA's"
    )
    return f"{device.platform} {device.device_kind}, kernels {kernels}"


def page_identity_of(
    folder: Path, config: ModelConfig, options: EngineOptions
) -> tuple[bytes, bytes]:
    """The `identity` of a page, and a stamp of the model's files on this machine: when each was
    last written.
    """
    times = [path.stat().st_mtime_ns for path in model_files(folder, options)]
    return identity(folder, config, options), repr(times).encode()


def identity(folder: Path, config: ModelConfig, options: EngineOptions) -> bytes:
    """A digest of everything that a page's bytes depend on, beside its tokens; alike on machines
    that are alike.

    Of large files it reads both ends.
    """
    model = replace(config, max_len=0)  # what it changes is in the rotary tables
    sizes = [getattr(options, name) for axis, name in PARALLEL.items() if axis != "data"]
    facts = [
        PAGE_FORMAT,
        model,
        *sizes,
        options.block_size,
        SHIFT_POSITIONS,
        jax.__version__,
        device_and_kernels(),
    ]
    if (multimodal := multimodal_of(folder, options)) is not None:
        facts.append(multimodal)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=32)
    for path in model_files(folder, options):
        digest.update(repr((path.name, path.stat().st_size)).encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE))
            file.seek(max(file.tell(), path.stat().st_size - SAMPLE))
            digest.update(file.read())
    return digest.digest()


def model_files(folder: Path, options: EngineOptions) -> list[Path]:
    """The files of the model, and of the model that drafts for it."""
    files = files_of(folder)
    if (chosen := options.speculation) is not None and chosen.model is not None:
        files += files_of(draft_folder(chosen, options))
    return files


def files_of(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def use_compile_cache() -> None:
    """Keep compiled steps between runs, unless the user has chosen a place (or none) himself."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        folder = home("jax")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # JAX would warn of each program
            reason = (
                f"{folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another place"
            )
            log.warning("compiled steps are not kept for the next start: %s", reason)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def on_host() -> bool:
    """Whether the device's memory is the host's."""
    return jax.default_backend() == "cpu"
