"""Runs step plans on the device: builds batches, launches compiled steps, reads sampled tokens."""

import time
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...model.checkpoint.adapters import Adapter, shard_adapter
from ...model.config import ModelConfig
from ...model.expert_copies import redundancy_of
from ...ops import adapter
from ...ops.gpu.graphs import compile_step
from ...ops.sampling import Sampled, SlotState
from ...sharding.mesh import device_axes
from ..api.errors import RequestError
from ..cache.media_store import MediaStore
from ..cache.page_moves import PageMoves
from ..device.compile_counter import CompileCounter
from ..device.encode import Encoding, MediaEncoder
from ..device.expert_loads import ExpertLoads
from ..device.expert_rebalancer import ExpertRebalancer
from ..device.host_snapshot import to_device, to_host
from ..device.page_copier import Offload, PageCopier
from ..device.pipeline import Pipeline
from ..device.programs import Call, Compiler, folder_of_programs
from ..device.state import State
from ..device.state_copier import StateCopier
from ..device.step import model_of, with_model
from ..device.step_shape import Size, StepShape, choose
from ..device.updates import reset_slot, set_bias, write_adapter
from ..multihost.leader import Leader
from ..request.grammar import Constraint
from ..request.media import MediaItem
from ..request.sequence import Sequence
from ..speculative.on_device.drafting import DeviceDrafter
from .batch_builder import BatchBuilder
from .scheduler import ScheduledSequence, StepPlan
from .slot_state import bias_of, first_row
from .step_result import InFlightStep, StepResult, read_result

MEASURED = 2, 12  # runs of a size, at least and at most,
MEASURING = 1.0  # of all together in so many seconds, as far as it depends on their number


class DeviceLost(RuntimeError):
    """A fresh device state cannot be allocated, as after an illegal access on a GPU."""


class Runner:
    """Owns the weights, the device state and the compiled steps."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        shape: StepShape,
        num_pages: tuple[int, ...],
        page_size: int,
        max_len: int,
        to_host: bool = False,
        load_weights: Callable[[], Any] | None = None,
        mesh: Mesh | None = None,
        rebalance_steps: int = 0,
        drafter: DeviceDrafter | None = None,
        max_fused_steps: int = 1,
        media_encoder: MediaEncoder | None = None,
    ):
        self.config = config
        self.media_encoder = media_encoder
        self.media_store = (
            None
            if media_encoder is None
            else MediaStore(media_encoder.num_rows, media_encoder.max_rows)
        )
        self.weights = weights
        self.max_fused = max_fused_steps
        self.num_pages = num_pages
        self.page_size = page_size
        self.load_weights = load_weights
        self.mesh, self.pipeline = mesh, Pipeline(config, mesh, drafter)
        devices = device_axes(mesh)
        self.shape = shape.with_cache(len(config.windows), page_size, max_len, devices.data.size)
        self.batch_builder = BatchBuilder(self.shape, len(self.pipeline), self.media_store)
        # With padding, so that each device of the tensor axis has as many tokens.
        self.vocab = -(-config.vocab_size // devices.tensor.size) * devices.tensor.size
        self.page_copier = PageCopier(self.pipeline, to_host, len(num_pages))
        snapshots = num_pages[-1] if len(num_pages) > len(config.windows) else 0
        self.state_copier = StateCopier(self.pipeline, shape.max_seqs, snapshots, devices.data.size)
        # as the caller of this chose it; reset() may be another thread's
        self.device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        self.remote = jax.default_backend() != "cpu"  # the device has memory of its own
        # what the sequence in each slot adds to its logits
        self.biases: dict[int, np.ndarray | None] = {}
        self.compiled: dict[Size, Any] = {}
        # the same for steps whose rows all draw, and do so plainly
        self.plain: dict[Size, Any] = {}
        self.fused_steps: Any = None  # several steps of the smallest size, one after the other
        # the same without the drafter, for decode steps that have no drafts
        self.without_drafter: dict[Size, Any] = {}
        self.draft_prefills: dict[Size, Any] = {}  # for rows that only the drafter computes
        self.decode_seconds: float | None = None  # of a step, where media are encoded beside it
        # Where drafts ask what they cost: of a step, and of each token a sequence that it drafts.
        self.step_seconds: dict[Size, tuple[float, float]] = {}
        self.write_adapter: Any = None  # the program that puts an adapter into a slot
        self.compiles = CompileCounter()
        self.leader: Leader | None = None  # to the other processes, which make the same calls
        counted = config.experts and len(self.pipeline) == 1 and jax.process_count() == 1
        self.expert_loads = ExpertLoads(config, devices.experts.size) if counted else None
        self.rebalancer = None
        if self.expert_loads is not None and mesh is not None and redundancy_of(config):
            self.rebalancer = ExpertRebalancer(self.expert_loads, config, mesh, rebalance_steps)
        self.state: State = self.make_state()
        self.homes: Any = None  # the shardings of weights and state, while the engine sleeps
        self.encoding: Encoding | None = None  # of the first pending item of the media store

    def tell(self, call: str, *values: Any) -> None:
        """Send a call to the other processes, which repeat it, before this process makes it."""
        if self.leader is not None:
            self.leader.send(call, *values)

    def fail(self, error: Exception) -> None:
        """End all processes after a failed step, since their states may differ; with one process do
        nothing.
        """
        if self.leader is not None:
            self.leader.fail("a step failed in process 0")
            raise error

    def close(self) -> None:
        """Let the other processes end, if there are any."""
        if self.leader is not None:
            self.leader.close()

    def reset(self) -> None:
        """Replace the device state with an empty one."""
        self.tell("reset")
        self.encoding = None
        self.state = None  # type: ignore[assignment] - there is no room for two
        try:
            self.state = jax.block_until_ready(self.make_state())
        except Exception as error:
            reason, *_ = str(error).splitlines() or [type(error).__name__]
            raise DeviceLost(f"the device is lost: {reason}") from error

    def make_state(self) -> State:
        """Allocate an empty device state, and forget what the host knew of the old one."""
        self.batch_builder.forget()
        if self.expert_loads is not None:
            self.expert_loads.reset()
        with jax.default_device(self.device):
            state = self.pipeline.make_state(
                self.num_pages, self.page_size, self.shape.max_seqs, self.shape.max_drafts
            )
            if self.media_encoder is not None:
                state = state.replace(media_RED=self.media_encoder.empty_store())
            return state

    def warm_up(
        self,
        progress: Callable[[Size], None] = lambda size: None,
        while_compiling: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile every step size, or load it from the cache; nothing is compiled after this.

        Args:
            progress: called with each size when the wait for its program begins.
            while_compiling: called once, while other threads compile or load the programs.
        """
        plain_programs = {}
        skipping = {}
        draft_prefills = {}
        fused = None
        drafter = self.pipeline.drafter
        with Compiler(folder_of_programs() if self.mesh is None else None) as compiler:
            make = partial(self.pipeline.make, compiler)
            operands = (self.weights, self.state)
            sizes = {}
            for size, layout in self.batch_builder.layouts.items():
                sizes[size] = make(*operands, layout)
                if self.remote and size.samples >= size.rows:
                    plain_programs[size] = make(*operands, layout, is_plain=True)
                if drafter is not None and drafter.is_skippable and size.rows == size.seqs:
                    skipping[size] = make(*operands, layout, self.remote, without_drafter=True)
            for size in self.batch_builder.prefill_sizes if self.shape.needs_draft_prefill else ():
                call = self.pipeline.draft_prefill(*operands, self.batch_builder.layouts[size])
                draft_prefills[size] = compiler.make(call, compile_step)
            if self.max_fused > 1:
                _, layout = next(iter(self.batch_builder.layouts.items()))
                fused = compiler.make(
                    self.pipeline.fused_steps(*operands, layout, self.max_fused), compile_step
                )
            finish_media = (
                None
                if self.media_encoder is None
                else self.media_encoder.warm_up(compiler, self.state.media_RED)
            )
            copies = {
                name: compiler.make(call)
                for name, call in self.page_copier.calls(self.state.by_page)
            }
            of_states = {
                name: compiler.make(call) for name, call in self.state_copier.calls(self.state)
            }
            if self.shape.num_adapters:
                self.write_adapter = compiler.make(self.adapter_write()).result()
            if self.expert_loads is not None:
                self.expert_loads.program = compiler.make(
                    self.expert_loads.read(self.state)
                ).result()
            if self.rebalancer is not None:
                lowered_programs = self.rebalancer.lower(model_of(self.weights))
                self.rebalancer.programs = {
                    key: lowered.compile() for key, lowered in lowered_programs
                }
            while_compiling()
            for size, stage_programs in sizes.items():
                progress(size)
                self.compiled[size] = self.pipeline.program(stage_programs)
            self.plain = {
                size: self.pipeline.program(programs) for size, programs in plain_programs.items()
            }
            self.without_drafter = {
                size: self.pipeline.program(programs, without_drafter=True)
                for size, programs in skipping.items()
            }
            self.fused_steps = fused and fused.result()
            self.draft_prefills = {
                size: program.result() for size, program in draft_prefills.items()
            }
            self.state_copier.programs = {
                name: program.result() for name, program in of_states.items()
            }
            self.page_copier.programs = {name: program.result() for name, program in copies.items()}
            if finish_media is not None:
                finish_media()
        # the processes find each other now or never
        if self.mesh is not None and self.mesh.is_multi_process:
            size, layout = next(iter(self.batch_builder.layouts.items()))
            jax.block_until_ready(self.step(size, False, layout.nothing))
        if self.shape.max_drafts:
            self.measure()
        if self.media_encoder is not None:
            self.decode_seconds = self.measure_decode()
        row = SlotState(
            *(np.zeros(leaf.shape[-1], leaf.dtype) for leaf in jax.tree.leaves(self.state.slots))
        )
        slots = reset_slot(self.state.slots, np.int32(0), row)
        slots = slots.replace(
            bias_BJV=set_bias(slots.bias_BJV, np.int32(0), np.int32(0), row.bias_BJV)
        )
        self.state = self.state.replace(slots=slots)
        jax.block_until_ready(self.state.slots)
        self.compiles.mark()

    def measure(self) -> None:
        """Measure the time of a step of each size in which every token is sampled from.

        The fastest of some interleaved runs counts. A larger size can replace a smaller one, so no
        size is slower than a larger one.
        """
        layouts = {
            size: layout
            for size, layout in self.batch_builder.layouts.items()
            if size.samples >= size.rows
        }
        max_drafts = self.shape.max_drafts
        busy = {
            (size, n): self.batch_builder.busy(layout, n)
            for size, layout in layouts.items()
            for n in (0, max_drafts)
        }
        for (size, _), buffer in busy.items():  # the first runs of a program are longer
            self.timed(size, buffer)
        shortest = dict.fromkeys(busy, float("inf"))
        began = time.perf_counter()
        for turn in range(MEASURED[1]):
            if turn >= MEASURED[0] and time.perf_counter() - began > MEASURING:
                break
            for (size, n), buffer in busy.items():
                shortest[size, n] = min(shortest[size, n], self.timed(size, buffer))
        for size in layouts:
            sizes = [
                larger
                for larger in layouts
                if larger.rows >= size.rows and larger.seqs >= size.seqs
            ]
            plain_seconds, drafting = (
                min(shortest[larger, n] for larger in sizes) for n in (0, max_drafts)
            )
            self.step_seconds[size] = plain_seconds, max(0.0, drafting - plain_seconds) / max_drafts

    def measure_decode(self) -> float:
        """The time of a step of the smallest size."""
        size, layout = next(iter(self.batch_builder.layouts.items()))
        buffer = self.batch_builder.busy(layout, 0)
        return min(self.timed(size, buffer) for _ in range(3))

    def timed(self, size: Size, buffer: np.ndarray) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self.step(size, False, buffer)[0])
        return time.perf_counter() - began

    def seconds(self, rows: int, seqs: int, drafts: int = 0) -> float:
        """The measured time of a step with `rows` sampled tokens of `seqs` sequences, which then
        drafts `drafts` tokens of each.
        """
        if not self.step_seconds:
            return 0.0
        replicas = device_axes(self.mesh).data.size
        seqs = min(-(-seqs // replicas), self.shape.max_seqs)
        rows = max(-(-rows // replicas), seqs)
        if rows > max(size.rows for size in self.step_seconds):
            return float("inf")
        plain_seconds, draft_seconds = self.step_seconds[
            choose(self.step_seconds, rows, seqs, rows, rows == seqs)
        ]
        return plain_seconds + drafts * draft_seconds

    def read_pages(self, group: int, pages: Seq[int]) -> np.ndarray:
        """Read pages of a cache group, one row of bytes each, without waiting for the steps in
        flight.
        """
        return self.page_copier.read(self.state.by_page, group, pages)

    def place_block(self, group: int, block_NX: Any) -> Any:
        """Put page bytes of another engine where this engine's devices can copy them into pages."""
        return self.page_copier.place(group, block_NX)

    def read_expert_loads(self) -> dict[int, dict[str, list]]:
        """See `LLM.expert_loads`."""
        if self.expert_loads is None:
            raise RequestError("model", "has no experts")
        return self.expert_loads.loads()

    def rebalance_experts(self) -> dict[str, float]:
        """See `LLM.rebalance_experts`."""
        if self.rebalancer is None:
            raise RequestError(
                "expert_redundancy", "is 0, so every expert stays where it is; start with 1 or more"
            )
        return self.rebalancer.plan()

    def sleep(self, keep_weights: bool, keep_pages: bool) -> None:
        """Free the device's memory; what the level keeps goes to host memory."""
        self.tell("sleep", keep_weights, keep_pages)
        self.encoding = None
        self.homes = jax.tree.map(lambda leaf: leaf.sharding, (self.weights, self.state))
        self.weights = to_host(self.weights, keep_weights)
        self.state = to_host(self.state, keep_pages)
        if self.media_encoder is not None:
            self.media_encoder.sleep(keep_weights)

    def wake_up(self) -> None:
        """Restore weights and state; dropped weights are loaded again, and dropped pages are empty."""
        self.tell("wake_up")
        weights, state = self.homes
        if self.weights is None:
            assert self.load_weights is not None, (
                "the weights were dropped and nobody knows where they came from"
            )
            self.weights = self.load_weights()
            if self.rebalancer is not None:
                self.rebalancer.reload()
        else:
            self.weights = jax.tree.map(to_device, self.weights, weights)
        if self.media_encoder is not None:
            self.media_encoder.wake_up()
        if self.state is None:
            self.state: State = self.make_state()
        else:
            self.state = jax.tree.map(to_device, self.state, state)

    def launch(self, plan: StepPlan, moves: PageMoves) -> InFlightStep:
        """Send the page copies and the step to the device, and return at once."""
        offloads = self.move(moves) if moves else []
        for item in plan.items:
            if item.is_first_step:
                self.assign(item.seq, item.start)
            if item.num_samples and item.seq.constraint is not None:
                self.constrain(item, item.seq.constraint)
        if self.rebalancer is not None:
            self.weights = with_model(
                self.weights, self.rebalancer.launching(model_of(self.weights))
            )
        if plan.steps > 1:
            return self.launch_fused(plan, offloads)
        for prefills in chunks(plan.draft_prefills, self.shape.max_tokens):
            self.draft_prefill(*self.batch_builder.build_draft_prefill(prefills))
        size, buffer = self.batch_builder.build(plan)
        sampled, hidden_RD = self.step(size, self.batch_builder.draws_plainly, buffer)
        if self.expert_loads is not None:
            self.expert_loads.launched(self.state)
        if self.remote:  # on its way as soon as the step is done, whatever the host does then
            sampled.tokens_R.copy_to_host_async()
            if sampled.drafts_BK is not None:
                sampled.drafts_BK.copy_to_host_async()
        return InFlightStep(plan, size, sampled, hidden_RD, offloads)

    def launch_fused(self, plan: StepPlan, offloads: list[Offload]) -> InFlightStep:
        """Send several decode steps as one program."""
        size = next(iter(self.batch_builder.layouts))
        builder = self.batch_builder
        buffers_SX, stops_BE = builder.build_fused(plan, self.max_fused)
        sampled, hidden_SRD, num_steps, self.state = self.fused_steps(
            self.weights, self.state, buffers_SX, stops_BE, np.int32(plan.steps)
        )
        if self.expert_loads is not None:
            self.expert_loads.launched(self.state)
        return InFlightStep(plan, size, sampled, hidden_SRD, offloads, num_steps)

    def max_fused_steps(self, plan: StepPlan) -> int:
        """Number of decode steps of this plan that the compiled program can fuse."""
        can_fuse = self.max_fused > 1 and plan.decodes and self.batch_builder.can_extend(plan)
        return self.max_fused if can_fuse else 1

    def encode_media(self, salt: Hashable, item: MediaItem, step_seconds: float) -> None:
        """Run a part of the encoder for the media store's first pending item, after the steps in
        flight. `step_seconds` is the time of a decode step.
        """
        assert self.media_encoder is not None and self.media_store is not None
        if self.encoding is None:
            rows = self.media_store.rows(salt, item, 0, item.num_rows)
            self.encoding = Encoding(self.media_encoder, item, rows)
        media_RED = self.encoding.advance(self.state.media_RED, step_seconds)
        self.state = self.state.replace(media_RED=media_RED)
        if self.encoding.is_done:
            self.encoding = None
            self.media_store.finish(salt, item)

    def adapter_write(self) -> Call:
        """The program that copies an adapter's matrices into a slot."""
        stacks = adapter.adapter_stacks(model_of(self.weights))
        return Call(write_adapter, (stacks, np.int32(0), jax.tree.map(one_of, stacks)))

    def load_adapter(self, slot: int, local_adapter: Adapter) -> None:
        """Copy an adapter into a slot; steps in flight finish first."""
        weights = model_of(self.weights)
        matrices = (
            local_adapter.matrices if self.mesh is None else shard_adapter(local_adapter, self.mesh)
        )
        stacks = self.write_adapter(adapter.adapter_stacks(weights), np.int32(slot), matrices)
        self.weights = with_model(self.weights, adapter.with_stacks(weights, stacks))

    def settle(self) -> None:
        """Read the experts' token counters; with no step in flight this does not wait."""
        if self.expert_loads is not None:
            self.expert_loads.settle(self.state)

    def step(self, size: Size, is_plain: bool, buffer: np.ndarray) -> tuple[Sampled, jax.Array]:
        """Run the compiled step for a batch."""
        if self.leader is not None:
            self.leader.step(size, is_plain, buffer)
        without_drafter = (
            size in self.without_drafter
            and (is_plain or not self.remote)
            and self.batch_builder.has_no_drafts(size, buffer)
        )
        program = self.without_drafter[size] if without_drafter else self.program(size, is_plain)
        sampled, hidden_RD, self.state = program(self.weights, self.state, buffer)
        return sampled, hidden_RD

    def draft_prefill(self, size: Size, buffer: np.ndarray) -> None:
        """Let the draft model compute tokens that it has skipped."""
        self.tell("draft_prefill", tuple(size), buffer)
        self.state = self.pipeline.run_draft_prefill(
            self.draft_prefills[size], self.weights, self.state, buffer
        )

    def program(self, size: Size, is_plain: bool = False) -> Any:
        """The compiled step for a batch of this size."""
        return (self.plain.get(size) if is_plain else None) or self.compiled[size]

    def move(self, moves: PageMoves) -> list[Offload]:
        """Start the page copies; over several hosts no page goes to host memory."""
        self.tell("copy", moves.copies, moves.saves, moves.loads)
        by_page, offloads = self.page_copier.move(self.state.by_page, moves)
        self.state = self.state_copier.move(
            self.state.with_pages(by_page), moves.saves, moves.loads
        )
        return offloads

    def collect(self, step: InFlightStep) -> StepResult:
        """Wait for a step and for the page copies before it."""
        for pages in step.offloads:
            pages.arrive()
        return read_result(step)

    def assign(self, seq: Sequence, computed: int) -> None:
        """Set up a sequence's slot: its sampling parameters, and its state on the device where it
        has any.

        Cached prompt tokens never pass through a step, so the penalties count them here.
        """
        bias = bias_of(seq, self.vocab)
        self.biases[self.batch_builder.place(seq)] = bias
        tracked = self.batch_builder.assign(seq, bias is not None or seq.constraint is not None)
        if bias is not None or tracked or seq.params.min_tokens or seq.params.logprob_token_ids:
            self.reset_slot(
                self.batch_builder.place(seq), first_row(seq, computed, self.vocab, bias)
            )

    def reset_slot(self, slot: int, row: SlotState) -> None:
        """Write a slot's initial sampling state to the device."""
        self.tell("reset_slot", slot, *jax.tree.leaves(row))
        self.state = self.state.replace(slots=reset_slot(self.state.slots, np.int32(slot), row))

    def constrain(self, item: ScheduledSequence, constraint: Constraint) -> None:
        """Mask the logits at the next token and after each draft token by the sequence's grammar."""
        slot = self.batch_builder.place(item.seq)
        bias_V = self.biases.get(slot)
        for row, allowed_V in enumerate(
            constraint.allowed_after(item.draft_tokens, item.seq.stop_ids)
        ):
            allowed_V = np.pad(allowed_V, (0, self.vocab - len(allowed_V)), constant_values=True)
            closed_V = np.where(
                allowed_V, np.float32(0) if bias_V is None else bias_V, np.float32(-np.inf)
            )
            self.set_bias(slot, row, closed_V)

    def set_bias(self, slot: int, row: int, bias_V: np.ndarray) -> None:
        """Write the logit bias of one sampled token of a slot to the device."""
        self.tell("set_bias", slot, row, bias_V)
        slots = self.state.slots
        slots = slots.replace(
            bias_BJV=set_bias(slots.bias_BJV, np.int32(slot), np.int32(row), bias_V)
        )
        self.state = self.state.replace(slots=slots)


def one_of(stack: jax.Array) -> jax.ShapeDtypeStruct:
    """The shape and sharding of one element of a stacked array."""
    sharding = None
    if isinstance(stack.sharding, NamedSharding):
        sharding = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding)


def chunks(
    items_by_replica: Seq[Seq[ScheduledSequence]], max_rows: int
) -> Iterator[tuple[tuple[ScheduledSequence, ...], ...]]:
    """Split scheduled sequences into plans of at most `max_rows` tokens per replica."""
    remaining = [list(replica_items) for replica_items in items_by_replica]
    while any(remaining):
        chunk = []
        for items in remaining:
            replica_chunk = []
            room = max_rows
            while items and room:
                item = items.pop(0)
                count = min(item.num_tokens, room)
                replica_chunk.append(item._replace(num_tokens=count))
                if count < item.num_tokens:
                    items.insert(
                        0,
                        item._replace(start=item.start + count, num_tokens=item.num_tokens - count),
                    )
                room -= count
            chunk.append(tuple(replica_chunk))
        yield tuple(chunk)
