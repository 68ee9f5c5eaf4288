"""The jitted step: embed, run the layers over KV pages, and sample."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...model import decoder, encoder
from ...model.checkpoint.placement import HOST
from ...model.config import ModelConfig
from ...model.mixers import LayerHooks
from ...model.partition import Stage, local_config, whole_model
from ...ops import adapter, sampling
from ...ops.attention import QueryRows, new_arrivals
from ...ops.state_rows import StateRows, sequence_for_row
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from ...sharding.mesh import device_axes
from ..speculative.on_device.drafting import (
    DeviceDrafter,
    SpeculativeWeights,
    TargetStep,
    draft,
    kv_page_size,
    sampled_sequence,
)
from ..speculative.on_device.replay import Replay
from .attend import attend_with, attend_within, recur_with, share_with
from .batch import Batch, BatchLayout
from .media_rows import stored_rows
from .state import State, empty_state, state_places
from .step_shape import StepShape


@dataclass(frozen=True)
class Place:
    """The sharding and memory of one weight leaf."""

    spec: P
    on_host: bool

    def fetch(self, leaf):
        """All that a device computes with, of what it keeps."""
        if self.on_host:
            leaf = jax.device_put(leaf, jax.memory.Space.Device)
        if "context" not in self.spec:
            return leaf
        return jax.lax.all_gather(leaf, "context", axis=self.spec.index("context"), tiled=True)


@dataclass(frozen=True)
class Places:
    """The mesh of a step, and the sharding of each weight leaf."""

    mesh: Mesh | None
    weights: tuple[Place, ...]

    @classmethod
    def of(cls, weights, mesh: Mesh | None) -> "Places | None":
        """Where the weights lie; None: all on one device."""
        places = tuple(
            Place(P() if mesh is None else leaf.sharding.spec, leaf.sharding.memory_kind == HOST)
            for leaf in jax.tree.leaves(weights)
        )
        return (
            None
            if mesh is None and not any(place.on_host for place in places)
            else cls(mesh, places)
        )

    def fetcher(self, weights):
        """(layer, its weights, x) -> (all of the weights that it computes with, x): not begun
        before x is there.
        """
        layers = model_of(jax.tree.structure(weights).unflatten(self.weights)).layers
        if not any(place.on_host or "context" in place.spec for place in jax.tree.leaves(layers)):
            return None

        def fetch(number: int, layer_weights, x):
            layer_weights, x = jax.lax.optimization_barrier((layer_weights, x))
            return jax.tree.map(
                lambda place, leaf: place.fetch(leaf), layers[number], layer_weights
            ), x

        return fetch


@partial(
    jax.jit,
    static_argnames=(
        "shape",
        "config",
        "is_plain",
        "places",
        "stage",
        "drafter",
        "without_drafter",
    ),
    donate_argnames="state",
)
def step(
    weights,
    state: State,
    buffer,
    x: Any = None,
    *,
    shape: StepShape,
    config: ModelConfig,
    is_plain: bool = False,
    places: Places | None = None,
    stage: Stage | None = None,
    drafter: DeviceDrafter | None = None,
    without_drafter: bool = False,
):
    """One step of every sequence in the batch that the buffer holds: (what is drawn, these rows'
    hidden states, state).

    The tokens alone tell the host all it needs: that of a row which is not ok is `sampling.BROKEN`
    or `BANNED`. Over a mesh each device does the same with its own part of weights and state. A
    `stage` that is not the last gives (rows, None, state), and one that is not the first gets such
    rows. With a `drafter`, whose weights come with the model's, the step also says what may come
    next. A step `without_drafter` neither verifies nor makes drafts.
    """
    stage = stage or whole_model(config)
    fetch = None if places is None else places.fetcher(weights)
    if places is None or places.mesh is None:
        return step_of_one(
            weights,
            state,
            buffer,
            x,
            shape,
            config,
            is_plain,
            ONE_DEVICE,
            stage,
            fetch,
            drafter,
            without_drafter,
        )
    local = local_config(config, places.mesh)
    devices = axes_of(places.mesh, shape)
    drafts = None if drafter is None else drafter.localize(places.mesh)
    of_weights = jax.tree.structure(weights).unflatten([place.spec for place in places.weights])
    of_state = state_places(state)
    of_rows = P((devices.data * devices.rows).name or None)
    is_multi_process = (
        places.mesh.is_multi_process
    )  # what is drawn must be on a device of each process
    drawn = P(None if is_multi_process else "data")

    def part(weights, state, buffer, x):
        replica_buffer = devices.data.local_slice(buffer)
        *out, state = step_of_one(
            weights,
            state,
            replica_buffer,
            x,
            shape,
            local,
            is_plain,
            devices,
            stage,
            fetch,
            drafts,
            without_drafter,
        )
        return *(
            jax.tree.map(devices.data.join, out) if is_multi_process and stage.is_last else out
        ), state

    run = jax.shard_map(
        part, mesh=places.mesh, in_specs=(of_weights, of_state, P(), of_rows),
        out_specs=(drawn if stage.is_last else of_rows, drawn, of_state), check_vma=False,
    )  # fmt: skip
    return run(weights, state, buffer, x)


@partial(jax.jit, static_argnames=("shape", "config"), donate_argnames="state")
def fused_steps(
    weights, state: State, buffers_SX, stops_BE, count, shape: StepShape, config: ModelConfig
):
    """Run the first `count` of these decode steps, each on the tokens that the step before it
    sampled.

    The loop ends early once the last token of every sequence is one of its stop tokens, which then
    has no keys and values yet.

    Returns:
        What `step` returns, with a leading axis of steps; the number of steps that ran; the state.
    """

    def is_running(carry):
        number, state, _ = carry
        tokens_B = state.last_tokens_B[jnp.minimum(owners_B, shape.max_seqs - 1)]
        ended_B = (tokens_B[:, None] == stops_BE).any(axis=1) | (owners_B >= shape.max_seqs)
        return (number < count) & ~ended_B.all()

    def run_step(carry):
        number, state, results = carry
        # What depends on weights alone XLA would compute before the loop, for all of them: an
        # embedding in float32.
        step_weights, number = jax.lax.optimization_barrier((weights, number))
        *result, state = step(step_weights, state, buffers_SX[number], shape=shape, config=config)
        return (
            number + 1,
            state,
            jax.tree.map(lambda all_S, value: all_S.at[number].set(value), results, result),
        )

    owners_B = BatchLayout(shape).read(buffers_SX[0]).store_R[: shape.size.seqs]
    *result_shapes, _ = jax.eval_shape(
        partial(step, shape=shape, config=config), weights, state, buffers_SX[0]
    )
    results = jax.tree.map(
        lambda leaf: jnp.zeros((len(buffers_SX), *leaf.shape), leaf.dtype), result_shapes
    )
    num_steps, state, results = jax.lax.while_loop(
        is_running, run_step, (jnp.int32(0), state, results)
    )
    return *results, num_steps, state


def axes_of(mesh: Mesh, shape: StepShape) -> DeviceAxes:
    """The device axes of a step; steps that carry prompts also split their tokens over the context
    axis.
    """
    axes = device_axes(mesh)
    split = axes.context.size > 1 and shape.size.rows > shape.size.seqs
    return replace(axes, rows=axes.context) if split else axes


def make_state(
    config: ModelConfig,
    paged: ModelConfig,
    stage: Stage,
    num_pages: tuple[int, ...],
    page_size: int,
    max_seqs: int,
    max_drafts: int,
    mesh: Mesh | None,
) -> State:
    """Allocate an empty state; `paged` has the target's layers, then the drafter's."""
    if mesh is None:
        return empty_state(
            config, paged, stage, num_pages, page_size, max_seqs, max_drafts, config.vocab_size
        )
    return split_state(config, paged, stage, num_pages, page_size, max_seqs, max_drafts, mesh)


@partial(jax.jit, static_argnums=range(8))
def split_state(
    config: ModelConfig,
    paged: ModelConfig,
    stage: Stage,
    num_pages: tuple[int, ...],
    page_size: int,
    max_seqs: int,
    max_drafts: int,
    mesh: Mesh,
) -> State:
    """Allocate an empty state over a mesh; compiled once, since recovery allocates another."""
    words = -(-config.vocab_size // mesh.shape["tensor"])

    def part() -> State:
        return empty_state(
            local_config(config, mesh),
            local_config(paged, mesh),
            stage,
            num_pages,
            page_size // mesh.shape["context"],
            max_seqs,
            max_drafts,
            words,
        )

    places = state_places(jax.eval_shape(part))
    return jax.shard_map(part, mesh=mesh, in_specs=(), out_specs=places, check_vma=False)()


def abstract_state(
    config: ModelConfig,
    paged: ModelConfig,
    stage: Stage,
    num_pages: tuple[int, ...],
    page_size: int,
    max_seqs: int,
    max_drafts: int,
    mesh: Mesh | None,
) -> State:
    """The shapes and shardings of an empty state."""
    state = jax.eval_shape(
        lambda: make_state(config, paged, stage, num_pages, page_size, max_seqs, max_drafts, mesh)
    )
    if mesh is None:
        return state

    def placed(leaf, place: P):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, place))

    return jax.tree.map(placed, state, state_places(state))


def step_of_one(
    weights,
    state: State,
    buffer,
    x,
    shape: StepShape,
    config: ModelConfig,
    is_plain: bool,
    axes: DeviceAxes,
    stage: Stage,
    fetch,
    drafter: DeviceDrafter | None = None,
    without_drafter: bool = False,
):
    """The part of a step that one device computes."""
    batch = BatchLayout(shape).read(buffer)
    both_weights = weights
    weights = model_of(weights)
    if shape.num_adapters:
        weights = adapting(weights, batch, shape.num_adapters)
    if stage.is_first and stage.is_last:  # with several stages the host knows all tokens
        batch = settle(batch, state, drafter is not None, axes)
    tokens_T = batch.tokens_T
    rows = rows_in(batch, shape, axes)
    positions_T = positions_in(batch, shape, axes)
    spare = positions_T.shape[0] - shape.size.rows
    if config.encodes:
        prepare = None
        attend = attend_within(positions_T, batch.starts_B1, config.max_len)
    else:
        prepare, attend = attend_with(config, rows.__getitem__, axes=axes)

    def record_experts(index, experts_TX, state: State) -> State:
        # Where the devices of `context` have the same rows, the first counts them.
        increment = (
            1
            if axes.rows.size > 1 or axes.context.size == 1
            else jnp.where(axes.context.index() == 0, 1, 0)
        )
        layer = config.expert_layers.index(index)
        return state.replace(
            loads_nLE=state.loads_nLE.at[0, layer, experts_TX.reshape(-1)].add(
                increment, mode="drop"
            )
        )

    local_positions_T = axes.rows.local_slice(positions_T)
    first = stage.layers.start
    if stage.is_first:
        types_T = types_in(batch, positions_T) if config.pairs else None
        media = None
        if state.media_RED is not None:
            rows_TD = stored_rows(state.media_RED, batch.media_T, 0, jnp.dtype(config.dtype))
            media = batch.media_T >= 0, rows_TD
        x = decoder.embed(
            weights,
            axes.rows.local_slice(jnp.pad(tokens_T, (0, spare))),
            local_positions_T,
            config,
            axes,
            types_T,
            media,
        )
    axis_positions_AT = None if batch.shifts_AT is None else positions_T + batch.shifts_AT
    add_after = None
    if state.media_RED is not None and state.media_RED.shape[1] > 1:
        add_after = partial(media_after, state.media_RED, batch.media_T, x[0].dtype)
    feature_layers = () if drafter is None else drafter.feature_layers
    features = {}

    def observe(index, x_TD) -> None:
        if index in feature_layers:
            features[index] = x_TD

    recur = None
    if state.recurrent and shape.max_drafts:
        lengths_B = next(
            slot_state["length"]
            for slot_state in state.recurrent.values()
            if "length" in slot_state
        )
        recur = Replay.of(batch, positions_T, lengths_B, shape.max_drafts).recur
    elif state.recurrent:
        recur = recur_with(
            StateRows.of(batch.starts_B1, positions_T, batch.owners_T, shape.max_seqs)
        )
    # Elsewhere not measured; and a reference to arrivals cannot be closed over.
    shares_trace = axes is ONE_DEVICE and fetch is None and jax.default_backend() == "cpu"
    hooks = LayerHooks(
        attend,
        prepare,
        recur,
        record_experts=None if state.loads_nLE is None else record_experts,
        fetch_weights=fetch,
        observe=observe if feature_layers else None,
        add_after=add_after,
        share_trace=share_with(config, jax.jit) if shares_trace else None,
    )
    x, state = decoder.run_layers(
        weights.layers, first, x, state, local_positions_T, config, hooks, axes, axis_positions_AT
    )
    if not stage.is_last:
        return x, None, state
    hidden_TD = decoder.final_norm(weights, x[0], config)
    if config.encodes:  # one row of each sequence draws, in their order
        hidden_RD = encoder.pool(hidden_TD, batch.starts_B1, config.pooling)
        hidden_RD = jnp.pad(hidden_RD, ((0, shape.size.samples - len(hidden_RD)), (0, 0)))
    else:
        hidden_RD = axes.rows.take(hidden_TD, batch.sample_rows_R)
    logits_RV = decoder.logits(weights, hidden_RD, config, axes)
    with jax.named_scope("sample"):
        axis = axes.tensor
        slots = sampling.count_tokens(
            state.slots, batch.owners_T, tokens_T, batch.is_prompt_T, batch.tracked_T, axis
        )
        sampled = sampling.sample(
            logits_RV, slots, batch.sampling, is_plain, axis, shape.num_logprobs
        )
        # negative where there is no token; what computes goes on from token 0
        reported_R = sampled.tokens_R
        sampled = sampled.replace(tokens_R=jnp.maximum(reported_R, 0))
        store_R = batch.store_R
        if shape.max_drafts and not without_drafter:
            accepted_R = sampling.accepted_drafts(sampled, batch.drafts_R, batch.depths_R)
            is_last_R = sampling.samples_next_token(accepted_R, batch.depths_R)
            slots = sampling.count_accepted(slots, batch.sampling, batch.drafts_R, accepted_R, axis)
            store_R = jnp.where(is_last_R, store_R, shape.max_seqs)
        last_tokens_B = state.last_tokens_B.at[store_R].set(sampled.tokens_R, mode="drop")
        state = state.replace(slots=slots, last_tokens_B=last_tokens_B)
    if drafter is not None:
        target = TargetStep(
            batch, rows, jnp.pad(tokens_T, (0, spare)), hidden_TD, features, sampled, axes, fetch
        )
        drafts_BK, state = draft(drafter, both_weights, state, target, store_R, is_plain)
        sampled = sampled.replace(drafts_BK=drafts_BK)
        state = hold(state, batch, store_R, drafts_BK)
    if config.head:
        hidden_RD = encoder.head(weights, hidden_RD, config)
    if config.classes is not None:
        hidden_RD = decoder.classes(weights, hidden_RD)
    return sampled.replace(tokens_R=reported_R), hidden_RD, state


def media_after(media_RED, media_T, dtype, index: int):
    """What is added to the output of one of the first layers; None after others."""
    if index + 1 >= media_RED.shape[1]:
        return None
    rows_TD = stored_rows(media_RED, media_T, index + 1, dtype)
    return jnp.where(media_T[:, None] >= 0, rows_TD, 0)


def adapting(weights, batch: Batch, num_slots: int):
    """The weights with the adapter of each token, and in the head of each sampled token."""
    layers = adapter.with_rows(weights.layers, batch.adapters_T, num_slots)
    return adapter.with_rows(weights.replace(layers=()), batch.adapters_R, num_slots).replace(
        layers=layers
    )


def settle(batch: Batch, state: State, drafts: bool, axes: DeviceAxes) -> Batch:
    """With all that the host did not know when it planned the step; `drafts`: which may be about
    drafts.
    """
    device_tokens = state.last_tokens_B[None]
    if not drafts:
        return batch.replace(tokens_T=named(batch.tokens_T, 0, device_tokens))
    device_tokens = jnp.concatenate([device_tokens, state.drafts_KB])
    owners_T = batch.owners_T
    starts_B1 = batch.starts_B1
    back_T = jnp.where(batch.ahead_T, state.rejected_B[owners_T], 0)
    positions_T = batch.positions_T - back_T
    page_T, offset_T = jnp.divmod(
        jnp.maximum(positions_T, 0), page_size := kv_page_size(state) * axes.context.size
    )
    seq_T = jnp.minimum(sequence_for_row(starts_B1, jnp.arange(len(owners_T))), len(starts_B1) - 2)
    slots_GT = tuple(
        jnp.where(batch.ahead_T, table_BM[seq_T, page_T] * page_size + offset_T, slots_T)
        for table_BM, slots_T in zip(batch.tables_GBM, batch.slots_GT, strict=True)
    )
    s = batch.sampling
    back_R = back_T[jnp.minimum(batch.sample_rows_R, len(back_T) - 1)]
    return batch.replace(
        tokens_T=named(batch.tokens_T, 0, device_tokens),
        positions_T=positions_T,
        slots_GT=slots_GT,
        drafts_R=named(batch.drafts_R, -1, device_tokens),
        sampling=s.replace(
            positions_R=s.positions_R - back_R, drafted_RJ=named(s.drafted_RJ, -1, device_tokens)
        ),
    )


def named(tokens, threshold: int, device_tokens):
    """The tokens, and those that the device holds in place of their names."""
    return jnp.where(
        tokens < threshold,
        jnp.maximum(device_tokens.reshape(-1)[jnp.maximum(-1 - tokens, 0)], 0),
        tokens,
    )


def hold(state: State, batch: Batch, store_R, drafts_BK) -> State:
    """Keep what the next step needs to know, which may be planned before the host does."""
    starts_B1 = batch.starts_B1
    no_slot = state.last_tokens_B.shape[0]
    rejected_R = (
        starts_B1[jnp.minimum(sampled_sequence(batch) + 1, len(starts_B1) - 1)]
        - 1
        - batch.sample_rows_R
    )
    owner_B = jnp.where(starts_B1[1:] > starts_B1[:-1], batch.owners_T[starts_B1[:-1]], no_slot)
    return state.replace(
        drafts_KB=state.drafts_KB.at[:, owner_B].set(drafts_BK.T, mode="drop"),
        rejected_B=state.rejected_B.at[store_R].set(rejected_R, mode="drop"),
    )


@partial(jax.jit, static_argnames=("shape", "drafter", "places"), donate_argnames="state")
def draft_prefill(
    weights,
    state: State,
    buffer,
    shape: StepShape,
    drafter: DeviceDrafter,
    places: Places | None = None,
) -> State:
    """The drafter computes rows that it did not follow in their step; the host knows their
    tokens.
    """

    def part(weights, state, buffer, drafter: DeviceDrafter, axes: DeviceAxes):
        batch = BatchLayout(shape).read(buffer)
        rows = rows_in(batch, shape, axes)
        tokens_T = jnp.pad(batch.tokens_T, (0, rows[0].positions_T.shape[0] - shape.size.rows))
        return drafter.prefill(
            weights, state, TargetStep(batch, rows, tokens_T, None, {}, None, axes, None)
        )[1]

    if places is None or places.mesh is None:
        return part(weights, state, buffer, drafter, ONE_DEVICE)
    devices = axes_of(places.mesh, shape)
    local_drafter = drafter.localize(places.mesh)
    of_weights = jax.tree.structure(weights).unflatten([place.spec for place in places.weights])
    run = jax.shard_map(
        lambda weights, state, buffer: part(
            weights, state, devices.data.local_slice(buffer), local_drafter, devices
        ),
        mesh=places.mesh,
        in_specs=(of_weights, state_places(state), P()),
        out_specs=state_places(state),
        check_vma=False,
    )
    return run(weights, state, buffer)


def rows_in(batch: Batch, shape: StepShape, axes: DeviceAxes) -> list[QueryRows]:
    """A step's rows by cache group, as many as divide over the devices that have a part of them."""
    positions_T = positions_in(batch, shape, axes)
    arrivals = new_arrivals()
    spare = positions_T.shape[0] - shape.size.rows
    sees_T = None
    if batch.span_ahead_T is not None:
        sees_T = positions_T + jnp.pad(batch.span_ahead_T, (0, spare))
    return [
        QueryRows(
            positions_T, batch.starts_B1, table_BM, jnp.pad(slots_T, (0, spare)), arrivals, sees_T
        )
        for table_BM, slots_T in zip(batch.tables_GBM, batch.slots_GT, strict=True)
    ]


def positions_in(batch: Batch, shape: StepShape, axes: DeviceAxes):
    """The positions of a step's rows, as many as divide over the devices that have a part of
    them.
    """
    return jnp.pad(batch.positions_T, (0, -shape.size.rows % axes.rows.size), constant_values=-1)


def types_in(batch: Batch, positions_T):
    """0 for rows of a sequence's first text, 1 for those of its second."""
    seq_T = jnp.minimum(
        sequence_for_row(batch.starts_B1, jnp.arange(len(positions_T))), len(batch.second_B) - 1
    )
    return jnp.where(positions_T >= batch.second_B[seq_T], 1, 0)


def model_of(weights: Any) -> Any:
    """The model's own weights, where a drafter's come with them."""
    return weights.model if isinstance(weights, SpeculativeWeights) else weights


def with_model(weights: Any, model: Any) -> Any:
    """The same with other weights of the model."""
    return weights.replace(model=model) if isinstance(weights, SpeculativeWeights) else model
