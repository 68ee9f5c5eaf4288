"""Pipeline stages: their weights and state, and the programs of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ...model.config import ModelConfig
from ...model.partition import Stage, stage_weights, stages
from ...ops.gpu.graphs import compile_step
from ...ops.implementations import variance
from ...sharding.mesh import stage_meshes
from ..speculative.on_device.drafting import DeviceDrafter
from .batch import STOPS, BatchLayout
from .programs import Call, Compiler, Program
from .state import State, owners, paged_layers
from .step import (
    Places,
    abstract_state,
    draft_prefill,
    fused_steps,
    make_state,
    model_of,
    step,
    with_model,
)

Made = TypeVar("Made", jax.stages.Lowered, Program)


class Pipeline:
    """One stage on one device or mesh; or several, each on its own, which a step passes one after
    the other.

        step n      [stage 0][stage 1][stage 2]
        step n+1             [stage 0][stage 1][stage 2]        other sequences

    A device begins its part of the next step as soon as its part of this one is done.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh | None, drafter: DeviceDrafter | None = None
    ):
        self.config = config
        self.drafter = drafter
        self.kv_config = (
            config if drafter is None else drafter.kv_config
        )  # the layers that own pages
        self.meshes: list[Mesh | None] = [None] if mesh is None else [*stage_meshes(mesh)]
        self.stages = stages(config, len(self.meshes))
        # why bits may depend on the batch, in the programs made so far
        self.variance: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.stages)

    def parts(self, weights, state: State) -> list[tuple[Any, State]]:
        """Weights and state of each stage."""
        if len(self) == 1:
            return [(weights, state)]
        weights_by_stage = [stage_weights(model_of(weights), stage) for stage in self.stages]
        weights_by_stage[-1] = with_model(weights, weights_by_stage[-1])  # the last one drafts
        return [
            (stage_part, stage_state(state, stage))
            for stage_part, stage in zip(weights_by_stage, self.stages, strict=True)
        ]

    def make_state(
        self, num_pages: tuple[int, ...], page_size: int, max_seqs: int, max_drafts: int = 0
    ) -> State:
        """Allocate an empty state."""
        sizes = num_pages, page_size, max_seqs, max_drafts
        places = zip(self.stages, self.meshes, strict=True)
        return join(
            [make_state(self.config, self.kv_config, stage, *sizes, mesh) for stage, mesh in places]
        )

    def abstract_state(
        self, num_pages: tuple[int, ...], page_size: int, max_seqs: int, max_drafts: int = 0
    ) -> State:
        """The shapes and shardings of an empty state."""
        sizes = num_pages, page_size, max_seqs, max_drafts
        places = zip(self.stages, self.meshes, strict=True)
        return join(
            [
                abstract_state(self.config, self.kv_config, stage, *sizes, mesh)
                for stage, mesh in places
            ]
        )

    def page_owners(self, group: int) -> list[list[int]]:
        """The layers of each stage that own the pages of a cache group; the group after the windows
        has the snapshots.

        Layers are named as in `State.by_page`.
        """
        if group == len(self.kv_config.windows):
            return [[~index for index in layers] for layers in self.state_layers()]
        return [
            owners(self.kv_config, paged_layers(self.config, self.kv_config, stage), group)
            for stage in self.stages
        ]

    def state_layers(self) -> list[list[int]]:
        """The recurrent layers of each stage."""
        return [
            [index for index in self.config.state_layers if index in stage.layers]
            for stage in self.stages
        ]

    def lower(
        self, weights, state: State, layout: BatchLayout, is_plain: bool = False
    ) -> list[jax.stages.Lowered]:
        """The lowered step of each stage, for inspection."""

        def lower(call: Call) -> jax.stages.Lowered:
            traced = call.trace()
            self.variance |= variance(traced.jaxpr.jaxpr)
            return traced.lower()

        return self.each(lower, weights, state, layout, is_plain)

    def make(
        self,
        compiler: Compiler,
        weights,
        state: State,
        layout: BatchLayout,
        is_plain: bool = False,
        without_drafter: bool = False,
    ) -> list[Program]:
        """The same programs, compiled."""
        make = partial(compiler.make, build=compile_step)
        programs = self.each(make, weights, state, layout, is_plain, without_drafter)
        self.variance = self.variance.union(*(program.variance for program in programs))
        return programs

    def each(
        self,
        make: Callable[[Call], Made],
        weights,
        state: State,
        layout: BatchLayout,
        is_plain: bool,
        without_drafter: bool = False,
    ) -> list[Made]:
        """Call `make` with each stage's part of a step."""
        if without_drafter:
            weights, state, _ = self.without_drafter(weights, state)
        results = []  # the first gets none
        x = ()
        for stage, mesh, (weights_part, state_part) in zip(
            self.stages, self.meshes, self.parts(weights, state), strict=True
        ):
            call = Call(
                step,
                (weights_part, state_part, layout.nothing, *x),
                shape=layout.shape,
                config=self.config,
                is_plain=is_plain,
                places=Places.of(weights_part, mesh),
                stage=stage,
                drafter=self.drafter if stage.is_last and not without_drafter else None,
                without_drafter=without_drafter,
            )
            results.append(make(call))
            if not stage.is_last:
                x = results[-1].out_info[:1]
        return results

    def fused_steps(self, weights, state: State, layout: BatchLayout, steps: int) -> Call:
        """The program of several decode steps, for a model on one device without a drafter."""
        stops_BE = np.zeros((layout.shape.size.seqs, STOPS), np.int32)
        args = weights, state, np.stack([layout.nothing] * steps), stops_BE, np.int32(steps)
        return Call(fused_steps, args, shape=layout.shape, config=self.config)

    def draft_prefill(self, weights, state: State, layout: BatchLayout) -> Call:
        """The program by which the draft model, on the last stage, computes skipped tokens."""
        weights_part, state_part = self.parts(weights, state)[-1]
        places = Places.of(weights_part, self.meshes[-1])
        return Call(
            draft_prefill,
            (weights_part, state_part, layout.nothing),
            shape=layout.shape,
            drafter=self.drafter,
            places=places,
        )

    def run_draft_prefill(self, compiled: Any, weights, state: State, buffer) -> State:
        """Run the draft prefill; returns the state."""
        stage_parts = self.parts(weights, state)
        weights_part, state_part = stage_parts[-1]
        return join(
            [
                *(state for _, state in stage_parts[:-1]),
                compiled(weights_part, state_part, buffer),
            ]
        )

    def program(self, stage_programs: list[Program], without_drafter: bool = False) -> Any:
        """A callable for a whole step: (weights, state, buffer) -> (sampled, hidden states, state)."""
        compiled = [program.result() for program in stage_programs]
        step = compiled[0] if len(compiled) == 1 else Relay(self, compiled)
        return WithoutDrafter(self, step) if without_drafter else step

    def without_drafter(self, weights, state: State) -> tuple[Any, State, dict[int, Any]]:
        """(the target's weights, the state without the drafter's pages, these pages)."""
        target_pages = {}
        drafter_pages = {}
        for index, pages in state.pages.items():
            (target_pages if index < len(self.config.layers) else drafter_pages)[index] = pages
        return model_of(weights), state.replace(pages=target_pages), drafter_pages


class WithoutDrafter:
    """Runs a step without the drafter's arrays, each of which costs a microsecond per call."""

    def __init__(self, pipeline: Pipeline, program: Any):
        self.pipeline = pipeline
        self.program = program

    def __call__(self, weights, state: State, buffer):
        weights, state, drafters = self.pipeline.without_drafter(weights, state)
        sampled, hidden_RD, state = self.program(weights, state, buffer)
        return sampled, hidden_RD, state.replace(pages=state.pages | drafters)


class Relay:
    """Runs the programs of all stages in order, without waiting for a device."""

    def __init__(self, pipeline: Pipeline, programs: list[Any]):
        self.pipeline = pipeline
        self.programs = programs

    def __call__(self, weights, state: State, buffer):
        x = ()
        hidden_RD = None
        states = []
        stage_parts = self.pipeline.parts(weights, state)
        for mesh, program, (weights_part, state_part) in zip(
            self.pipeline.meshes, self.programs, stage_parts, strict=True
        ):
            *x, hidden_RD, state_part = program(weights_part, state_part, buffer, *move(x, mesh))
            states.append(state_part)
        return *x, hidden_RD, join(states)


def move(x, mesh: Any):
    """Copy shards to another mesh."""
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec)), x
    )


def stage_state(state: State, stage: Stage) -> State:
    """The part of the state that a stage has."""
    pages = {
        index: layer_pages
        for index, layer_pages in state.pages.items()
        if index in stage.layers or (stage.is_last and index >= stage.layers.stop)  # a drafter's
    }
    recurrent, snapshots = (
        {index: layer_pages for index, layer_pages in by_layer.items() if index in stage.layers}
        for by_layer in (state.recurrent, state.snapshots)
    )
    return (state if stage.is_last else State({})).replace(
        pages=pages, recurrent=recurrent, snapshots=snapshots
    )


def join(states: list[State]) -> State:
    """Combine the states of all stages; the last one has the slots."""
    pages = {}
    recurrent = {}
    snapshots = {}
    for state in states:
        pages |= state.pages
        recurrent |= state.recurrent
        snapshots |= state.snapshots
    return states[-1].replace(pages=pages, recurrent=recurrent, snapshots=snapshots)
