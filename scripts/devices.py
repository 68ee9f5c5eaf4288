"""The options that say over which devices and processes a model is spread."""

from typing import Annotated

import typer

from .sizes import ENGINE, sized

TensorParallel = Annotated[
    int | None,
    typer.Option(help="Devices that each have a part of every layer.", show_default="1", rich_help_panel=ENGINE),
]
ExpertParallel = Annotated[
    int | None,
    typer.Option(
        help="Groups of devices that each have some of the experts.", show_default="1", rich_help_panel=ENGINE
    ),
]
ContextParallel = Annotated[
    int | None,
    typer.Option(
        help="Groups of devices that each have some positions of every page.", show_default="1", rich_help_panel=ENGINE
    ),
]
PipelineParallel = Annotated[
    int | None,
    typer.Option(help="Groups of devices that each have some of the layers.", show_default="1", rich_help_panel=ENGINE),
]
DataParallel = Annotated[
    int | None,
    typer.Option(
        help="Groups of devices that each have sequences and a cache of their own; they share the experts.",
        show_default="1",
        rich_help_panel=ENGINE,
    ),
]
ShardWeights = Annotated[
    bool | None,
    typer.Option(
        "--shard-weights",
        help="Keep a part of every layer on each device of --context-parallel-size, put together as it is used.",
        show_default="off",
        rich_help_panel=ENGINE,
    ),
]
WeightsHostBytes = Annotated[
    int | None,
    sized("--weights-host-bytes", "Weights that stay in host memory, brought layer by layer.", "BYTES", ENGINE, "none"),
]
ExpertRedundancy = Annotated[
    int | None,
    typer.Option(
        help="Places of every layer for further copies of experts that many rows want.",
        show_default="0",
        rich_help_panel=ENGINE,
    ),
]
ExpertRebalance = Annotated[
    int | None,
    typer.Option(
        help="Steps from one look at how evenly these are used to the next; 0: only when asked.",
        show_default="3000",
        rich_help_panel=ENGINE,
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        help="Where process 0 is found by the others; the port after it is used too.",
        metavar="HOST:PORT",
        show_default="none",
        rich_help_panel=ENGINE,
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(help="Processes, one a host, whose devices serve together.", show_default="1", rich_help_panel=ENGINE),
]
ProcessId = Annotated[
    int | None,
    typer.Option(
        help="Which of them this is: 0 serves, the others lend it their devices.",
        show_default="0",
        rich_help_panel=ENGINE,
    ),
]

DEVICE_OPTIONS = {
    "tensor_parallel_size": TensorParallel,
    "expert_parallel_size": ExpertParallel,
    "context_parallel_size": ContextParallel,
    "pipeline_parallel_size": PipelineParallel,
    "data_parallel_size": DataParallel,
    "shard_weights": ShardWeights,
    "weights_host_bytes": WeightsHostBytes,
    "expert_redundancy": ExpertRedundancy,
    "expert_rebalance_steps": ExpertRebalance,
    "coordinator_address": Coordinator,
    "num_processes": NumProcesses,
    "process_id": ProcessId,
}
