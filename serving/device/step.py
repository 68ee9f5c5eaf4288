"""The one jitted step: append, attend, and draw, over a state that stays on the device."""

import math
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
from ...ops.attention import KVPages, QueryRows, new_arrivals
from ...ops.state_rows import StateRows, sequence_for_row
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from ...sharding.mesh import device_axes
from .attend import attend_with, attend_within, recur_with, share_with
from .batch import Batch, BatchLayout
from .drafts import Seen, StepDrafter, WithDrafter, draft, entry_of, page_size_of, path_of
from .replay import Replay
from .state import State, empty_state, state_places
from .step_shape import StepShape


@dataclass(frozen=True)
class Place:
    """How a leaf of the weights lies on its devices."""

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
    """Over which devices a step runs, and how each leaf of the weights lies on them."""

    mesh: Mesh | None
    weights: tuple[Place, ...]

    @classmethod
    def of(cls, weights, mesh: Mesh | None) -> "Places | None":
        """Where the weights lie; None: all on one device."""
        found = tuple(
            Place(P() if mesh is None else leaf.sharding.spec, leaf.sharding.memory_kind == HOST)
            for leaf in jax.tree.leaves(weights)
        )
        return (
            None if mesh is None and not any(place.on_host for place in found) else cls(mesh, found)
        )

    def fetcher(self, weights):
        """(layer, its weights, x) -> (all of the weights that it computes with, x): not begun
        before x is there.
        """
        layers = model_of(jax.tree.structure(weights).unflatten(self.weights)).layers
        if not any(place.on_host or "context" in place.spec for place in jax.tree.leaves(layers)):
            return None

        def fetch(number: int, own, x):
            own, x = jax.lax.optimization_barrier((own, x))
            return jax.tree.map(lambda place, leaf: place.fetch(leaf), layers[number], own), x

        return fetch


@partial(
    jax.jit,
    static_argnames=("shape", "config", "plain", "places", "stage", "drafter", "rests"),
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
    plain: bool = False,
    places: Places | None = None,
    stage: Stage | None = None,
    drafter: StepDrafter | None = None,
    rests: bool = False,
):
    """One step of every sequence in the batch that the buffer holds: (what is drawn, these rows'
    hidden states, state).

    The tokens alone tell the host all it needs: that of a row which is not ok is `sampling.BROKEN`
    or `BANNED`. Over a mesh each device does the same with its own part of weights and state. A
    `stage` that is not the last gives (rows, None, state), and one that is not the first gets such
    rows. With a `drafter`, whose weights come with the model's, the step also says what may come
    next. One that `rests` has no drafts.
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
            plain,
            ONE_DEVICE,
            stage,
            fetch,
            drafter,
            rests,
        )
    own = local_config(config, places.mesh)
    devices = axes_of(places.mesh, shape)
    drafts = None if drafter is None else drafter.on(places.mesh)
    of_weights = jax.tree.structure(weights).unflatten([place.spec for place in places.weights])
    of_state = state_places(state)
    of_rows = P((devices.data * devices.rows).name or None)
    tells = places.mesh.is_multi_process  # what is drawn must be on a device of each process
    drawn = P(None if tells else "data")

    def part(weights, state, buffer, x):
        mine = devices.data.local_slice(buffer)
        *out, state = step_of_one(
            weights, state, mine, x, shape, own, plain, devices, stage, fetch, drafts, rests
        )
        return *(jax.tree.map(devices.data.join, out) if tells and stage.is_last else out), state

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
        own, number = jax.lax.optimization_barrier((weights, number))
        *result, state = step(own, state, buffers_SX[number], shape=shape, config=config)
        return (
            number + 1,
            state,
            jax.tree.map(lambda all_S, one: all_S.at[number].set(one), results, result),
        )

    owners_B = BatchLayout(shape).read(buffers_SX[0]).store_R[: shape.size.seqs]
    *like, _ = jax.eval_shape(
        partial(step, shape=shape, config=config), weights, state, buffers_SX[0]
    )
    results = jax.tree.map(lambda one: jnp.zeros((len(buffers_SX), *one.shape), one.dtype), like)
    num_steps, state, results = jax.lax.while_loop(
        is_running, run_step, (jnp.int32(0), state, results)
    )
    return *results, num_steps, state


def axes_of(mesh: Mesh, shape: StepShape) -> DeviceAxes:
    """Steps that carry prompts have rows enough for each device to take a part of them, outside of
    attention.
    """
    found = device_axes(mesh)
    split = found.context.size > 1 and shape.size.rows > shape.size.seqs
    return replace(found, rows=found.context) if split else found


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
    """A state with no request in it, where it is to lie; `paged` are the model's layers, and then a
    drafter's.
    """
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
    """Each device makes its part; compiled once, since an engine that recovers makes another."""
    own = [local_config(each, mesh) for each in (config, paged)]
    words = -(-config.vocab_size // mesh.shape["tensor"])

    def part() -> State:
        return empty_state(
            *own, stage, num_pages, page_size // mesh.shape["context"], max_seqs, max_drafts, words
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
    """The same without memory."""
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
    plain: bool,
    axes: DeviceAxes,
    stage: Stage,
    fetch,
    drafter: StepDrafter | None = None,
    rests: bool = False,
):
    """What one device does in a step."""
    batch = BatchLayout(shape).read(buffer)
    both = weights
    weights = model_of(weights)
    if shape.num_adapters:
        weights = adapting(weights, batch, shape.num_adapters)
    if stage.is_first and stage.is_last:  # with several stages the host knows all tokens
        batch = settle(batch, state, drafter is not None and shape.num_branches == 1, axes)
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
        one = (
            1
            if axes.rows.size > 1 or axes.context.size == 1
            else jnp.where(axes.context.index() == 0, 1, 0)
        )
        layer = config.expert_layers.index(index)
        return state.replace(
            loads_nLE=state.loads_nLE.at[0, layer, experts_TX.reshape(-1)].add(one, mode="drop")
        )

    own_T = axes.rows.local_slice(positions_T)
    first = stage.layers.start
    if stage.is_first:
        types_T = types_in(batch, positions_T) if config.pairs else None
        x = decoder.embed(
            weights,
            axes.rows.local_slice(jnp.pad(tokens_T, (0, spare))),
            own_T,
            config,
            axes,
            types_T,
        )
    wanted = () if drafter is None else drafter.features
    features = {}

    def observe(index, x_TD) -> None:
        if index in wanted:
            features[index] = x_TD

    recur = None
    if state.kept and shape.max_drafts:
        lengths_B = next(held["length"] for held in state.kept.values() if "length" in held)
        recur = Replay.of(batch, positions_T, lengths_B, shape.max_drafts).recur
    elif state.kept:
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
        observe=observe if wanted else None,
        share_trace=share_with(config, jax.jit) if shares_trace else None,
    )
    x, state = decoder.run_layers(weights.layers, first, x, state, own_T, config, hooks, axes)
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
        sampled = sampling.sample(logits_RV, slots, batch.sampling, plain, axis, shape.num_logprobs)
        # negative where there is no token; what computes goes on from token 0
        reported_R = sampled.tokens_R
        sampled = sampled.replace(tokens_R=jnp.maximum(reported_R, 0))
        store_R = batch.store_R
        if shape.max_drafts and not rests:
            accepted_R = sampling.accepted_drafts(sampled, batch.drafts_R, batch.depths_R)
            ends_R = sampling.samples_next_token(accepted_R, batch.depths_R)
            if shape.num_branches > 1:
                numbers_R, paths_R = path_of(batch)
                wins_R = sampling.accepted_branches(
                    accepted_R, batch.depths_R, numbers_R, paths_R, shape.num_branches
                )
                accepted_R = accepted_R & wins_R
                ends_R = ends_R & wins_R
            slots = sampling.count_accepted(slots, batch.sampling, batch.drafts_R, accepted_R, axis)
            store_R = jnp.where(ends_R, store_R, shape.max_seqs)
        last_tokens_B = state.last_tokens_B.at[store_R].set(sampled.tokens_R, mode="drop")
        state = state.replace(slots=slots, last_tokens_B=last_tokens_B)
    if drafter is not None:
        seen = Seen(
            batch, rows, jnp.pad(tokens_T, (0, spare)), hidden_TD, features, sampled, axes, fetch
        )
        drafts_BK, state = draft(drafter, both, state, seen, store_R, plain)
        sampled = sampled.replace(drafts_BK=drafts_BK)
        if shape.num_branches == 1:  # else the host chooses one before the next step
            state = hold(state, batch, store_R, drafts_BK)
    if config.head:
        hidden_RD = encoder.head(weights, hidden_RD, config)
    if config.classes is not None:
        hidden_RD = decoder.classes(weights, hidden_RD)
    return sampled.replace(tokens_R=reported_R), hidden_RD, state


def adapting(weights, batch: Batch, num_slots: int):
    """The weights, in whose layers each of the step's rows has its adapter, and in the head those
    that draw.
    """
    layers = adapter.with_rows(weights.layers, batch.adapters_T, num_slots)
    return adapter.with_rows(weights.replace(layers=()), batch.adapters_R, num_slots).replace(
        layers=layers
    )


def settle(batch: Batch, state: State, drafts: bool, axes: DeviceAxes) -> Batch:
    """With all that the host did not know when it planned the step; `drafts`: which may be about
    drafts.
    """
    held = state.last_tokens_B[None]
    if not drafts:
        return batch.replace(tokens_T=named(batch.tokens_T, 0, held))
    held = jnp.concatenate([held, state.drafts_KB])
    owners_T = batch.owners_T
    starts_B1 = batch.starts_B1
    back_T = jnp.where(batch.ahead_T, state.rejected_B[owners_T], 0)
    positions_T = batch.positions_T - back_T
    page_T, offset_T = jnp.divmod(
        jnp.maximum(positions_T, 0), page_size := page_size_of(state) * axes.context.size
    )
    seq_T = jnp.minimum(sequence_for_row(starts_B1, jnp.arange(len(owners_T))), len(starts_B1) - 2)
    slots_GT = tuple(
        jnp.where(batch.ahead_T, table_BM[seq_T, page_T] * page_size + offset_T, slots_T)
        for table_BM, slots_T in zip(batch.tables_GBM, batch.slots_GT, strict=True)
    )
    s = batch.sampling
    back_R = back_T[jnp.minimum(batch.sample_rows_R, len(back_T) - 1)]
    return batch.replace(
        tokens_T=named(batch.tokens_T, 0, held),
        positions_T=positions_T,
        slots_GT=slots_GT,
        drafts_R=named(batch.drafts_R, -1, held),
        sampling=s.replace(
            positions_R=s.positions_R - back_R, drafted_RJ=named(s.drafted_RJ, -1, held)
        ),
    )


def named(tokens, below: int, held):
    """The tokens, and those that the device holds in place of their names."""
    return jnp.where(
        tokens < below, jnp.maximum(held.reshape(-1)[jnp.maximum(-1 - tokens, 0)], 0), tokens
    )


def hold(state: State, batch: Batch, store_R, drafts_BK) -> State:
    """Keep what the next step needs to know, which may be planned before the host does."""
    starts_B1 = batch.starts_B1
    none = state.last_tokens_B.shape[0]
    rejected_R = (
        starts_B1[jnp.minimum(entry_of(batch) + 1, len(starts_B1) - 1)] - 1 - batch.sample_rows_R
    )
    owner_B = jnp.where(starts_B1[1:] > starts_B1[:-1], batch.owners_T[starts_B1[:-1]], none)
    return state.replace(
        drafts_KB=state.drafts_KB.at[:, owner_B].set(drafts_BK.T, mode="drop"),
        rejected_B=state.rejected_B.at[store_R].set(rejected_R, mode="drop"),
    )


@partial(jax.jit, static_argnames=("shape", "drafter", "places"), donate_argnames="state")
def catch_up(
    weights,
    state: State,
    buffer,
    shape: StepShape,
    drafter: StepDrafter,
    places: Places | None = None,
) -> State:
    """The drafter computes rows that it did not follow in their step; the host knows their
    tokens.
    """

    def part(weights, state, buffer, drafter: StepDrafter, axes: DeviceAxes):
        batch = BatchLayout(shape).read(buffer)
        rows = rows_in(batch, shape, axes)
        tokens_T = jnp.pad(batch.tokens_T, (0, rows[0].positions_T.shape[0] - shape.size.rows))
        return drafter.follow(
            weights, state, Seen(batch, rows, tokens_T, None, {}, None, axes, None)
        )[1]

    if places is None or places.mesh is None:
        return part(weights, state, buffer, drafter, ONE_DEVICE)
    devices = axes_of(places.mesh, shape)
    own = drafter.on(places.mesh)
    of_weights = jax.tree.structure(weights).unflatten([place.spec for place in places.weights])
    run = jax.shard_map(
        lambda weights, state, buffer: part(
            weights, state, devices.data.local_slice(buffer), own, devices
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
    return [
        QueryRows(positions_T, batch.starts_B1, table_BM, jnp.pad(slots_T, (0, spare)), arrivals)
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
    return weights.model if isinstance(weights, WithDrafter) else weights


def with_model(weights: Any, model: Any) -> Any:
    """The same with other weights of the model."""
    return weights.replace(model=model) if isinstance(weights, WithDrafter) else model


@jax.jit
def read_loads(loads_nLE) -> jax.Array:
    """A copy that the next step does not take, of all devices together."""
    return jnp.sum(loads_nLE, axis=0)


@jax.jit
def read_pages(layers: list[KVPages], pages_N) -> jax.Array:
    """What these pages hold in all the layers, as bytes: [N, bytes of a page]."""
    N = pages_N.shape[0]
    parts = [
        jax.lax.bitcast_convert_type(leaf[pages_N], jnp.uint8) for leaf in jax.tree.leaves(layers)
    ]
    return jnp.concatenate([part.reshape(N, -1) for part in parts], axis=1)


@partial(jax.jit, static_argnames=("mesh", "places"), donate_argnames="stack_SX")
def move_experts(stack_SX, sent_nnM, kept_nnM, turns, mesh: Mesh, places: P) -> jax.Array:
    """A stack of experts over devices, of which each takes over some of the others', as
    `placement.transfers` says.
    """
    axis = device_axes(mesh).experts

    def part(stack_SX, sent_nnM, kept_nnM, turns):
        me = axis.index()

        def take(turn, filled_SX):  # all are sent as they lay before the first turn
            came_nX = axis.exchange(stack_SX[sent_nnM[:, me, turn]])
            return filled_SX.at[kept_nnM[me, :, turn]].set(came_nX, mode="drop")

        return jax.lax.fori_loop(0, turns, take, stack_SX)

    in_specs = (places, P(), P(), P())
    run = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=places, check_vma=False)
    return run(stack_SX, sent_nnM, kept_nnM, turns)


@partial(jax.jit, donate_argnames="stacks")
def write_adapter(stacks, slot, matrices):
    """An adapter in a slot of the stacks."""
    return adapter.write_slot(stacks, slot, matrices)


@partial(jax.jit, donate_argnames="layers")
def copy_pages(layers: list[KVPages], from_N, to_N) -> list[KVPages]:
    """These pages hold, in all the layers, what those do."""
    return jax.tree.map(lambda leaf: leaf.at[to_N].set(leaf[from_N]), layers)


@partial(jax.jit, donate_argnames="layers")
def write_pages(layers: list[KVPages], pages_N, bytes_NX) -> list[KVPages]:
    """The inverse: these pages hold what the bytes say."""
    N = pages_N.shape[0]
    at = 0

    def write(leaf):
        nonlocal at
        size = leaf.dtype.itemsize
        width = math.prod(leaf.shape[1:]) * size
        own = bytes_NX[:, at : at + width].reshape(
            N, *leaf.shape[1:], *([size] if size > 1 else [])
        )
        at += width
        return leaf.at[pages_N].set(jax.lax.bitcast_convert_type(own, leaf.dtype))

    return jax.tree.map(write, layers)


@partial(jax.jit, donate_argnames="snapshots")
def save_states(snapshots, kept, slots_N, pages_N):
    """These pages hold what layers keep of the sequences in those slots."""
    return {
        index: {
            name: held.at[pages_N].set(kept[index][name][slots_N]) for name, held in own.items()
        }
        for index, own in snapshots.items()
    }


@partial(jax.jit, donate_argnames="kept")
def load_states(kept, snapshots, pages_N, slots_N, lengths_N):
    """The inverse: these slots go on from what those pages hold, after so many tokens."""

    def loaded(name: str, held, own):
        if name == "length":
            return held.at[slots_N].set(lengths_N, mode="drop")
        return held.at[slots_N].set(own[name][pages_N], mode="drop") if name in own else held

    return {
        index: {name: loaded(name, held, snapshots[index]) for name, held in own.items()}
        for index, own in kept.items()
    }


@partial(jax.jit, donate_argnames="slots")
def reset_slot(slots: sampling.SlotState, slot, row: sampling.SlotState) -> sampling.SlotState:
    """Make a slot ready for a new request."""
    return sampling.replace_row(slots, slot, row)


@partial(jax.jit, donate_argnames="bias_BJV")
def set_bias(bias_BJV, slot, bias_row, bias_V) -> jax.Array:
    """What the token may be that one of a slot's rows draws."""
    return sampling.set_bias(bias_BJV, slot, bias_row, bias_V)
