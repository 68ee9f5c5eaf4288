"""`quire plan --devices N`: rank the meshes over which a model can be sharded."""

from dataclasses import asdict

from ...serving.api.sizes import amount
from .. import options as o
from ..tables import length_name, table

SHOWN = 10
NAMES = {
    "tensor": "tensor",
    "expert": "expert",
    "context": "context",
    "pipe": "pipeline",
    "data": "data",
}
BEST = {
    "throughput": "tokens a second",
    "latency": "the time of a token",
    "prompts": "prompt tokens a second",
}


def check(devices: int | None, batch: int | None, best: str | None) -> None:
    """Reject options that would have no effect, and unknown goals."""
    for name, value in (("--batch", batch), ("--best", best)):
        if value is not None and devices is None:
            raise o.UsageError(
                f"{name} is {value}; it needs --devices, the number of devices to plan for"
            )
    if best is not None and best not in BEST:
        raise o.UsageError(f"--best is {best!r}; it can be {', '.join(BEST)}")


def propose(
    config, weights, device, devices: int, batch: int, length: int, best: str | None
) -> dict:
    """Rank all meshes with enough memory for the workload, best first.

    Args:
        config: The model's config.
        weights: Specs of its weights.
        device: The kind of device, with the memory that is usable.
        devices: Number of devices.
        batch: Number of sequences that decode together.
        length: Tokens per sequence.
        best: A key of `BEST`, or None for throughput.
    """
    from ...model.config import ModelError
    from ...model.planning import meshes
    from ...serving.api.options import EngineOptions

    if length > config.max_len:
        raise ModelError(
            f"--length is {length}; the model was made for at most {config.max_len} positions"
        )
    work = meshes.Workload(
        batch, length, EngineOptions().on(device.platform).max_num_batched_tokens
    )
    candidates = meshes.evaluate_meshes(config, device, work, devices, weights)
    ranked = meshes.rank_meshes(candidates, work, best or "throughput")
    if not ranked:
        raise meshes.no_mesh_error(config, device, work, devices, weights)
    return {
        "devices": devices,
        "work": asdict(work),
        "best": best or "throughput",
        "too_small": len(candidates) - len(ranked),
        "choices": [asdict(choice) for choice in ranked],
    }


def text(result: dict) -> str:
    """The proposal as text with a table."""
    proposal = result["meshes"]
    device = result["device"]
    work = proposal["work"]
    choices = proposal["choices"]
    rows = [row(choice, "*" if choice is choices[0] else "") for choice in choices[:SHOWN]]
    head = ("mesh", "weights", "fit", "step", "read", "compute", "send", "tok/s", "prompts")
    flags = [
        f"--{name}-parallel-size {choices[0]['sizes'][axis]}"
        for axis, name in NAMES.items()
        if choices[0]["sizes"][axis] > 1
    ]
    notes = [f"* the best for {BEST[proposal['best']]}: {' '.join(flags) or 'a single device'}"]
    if len(choices) > SHOWN:
        notes.append(f"{len(choices) - SHOWN} more with --json")
    if proposal["too_small"]:
        notes.append(f"{proposal['too_small']} others do not hold so many sequences")
    return "\n\n".join(
        (
            (
                f"{result['model']}: {result['layers']} layers, {amount(result['weight_bytes'])} "
                f"of weights in {result['dtype']}, over {proposal['devices']} x {device['name']} "
                f"({device['about']})\n{amount(device['memory'])}, of which "
                f"{amount(result['usable_memory'])} are used; {device['bandwidth'] / 1e9:,.0f} "
                f"GB/s, {device['flops'] / 1e12:,.4g} TFLOP/s; {device['link'] / 1e9:,.4g} GB/s "
                f"within a machine of 8, {device['network'] / 1e9:,.4g} between"
            ),
            f"{work['batch']} sequences of {length_name(work['length'])} tokens; "
            f"milliseconds of a step through all stages:\n{table(head, rows)}",
            "\n".join(notes),
            (
                "weights: memory that they take of each device\nfit: sequences of this length "
                "beside them, on all devices\nstep: milliseconds of a step in which every "
                "sequence gets a token; read, compute, send: what each would\n  take alone: "
                "reading weights and cache, arithmetic, sending between devices\ntok/s: tokens "
                "that all sequences get in a second\nprompts: tokens of prompts that are read in "
                f"a second, in chunks of {work['chunk']}\nEstimates from bytes and operations: "
                "kernels reach less, and the host's time is left out."
            ),
        )
    )


def row(choice: dict, mark: str) -> tuple:
    decode = choice["decode"]
    return (
        mesh_name(choice["sizes"]) + mark,
        amount(choice["weight_bytes"]),
        f"{choice['sequences']:,}",
        *(f"{1e3 * decode[name]:.2f}" for name in ("total", "read", "compute", "send")),
        f"{choice['tokens_a_second']:,.0f}",
        f"{choice['prompt_tokens_a_second']:,.0f}",
    )


def mesh_name(sizes: dict[str, int]) -> str:
    """The mesh as in `tensor 8 pipe 2`; axes of size 1 are left out."""
    return " ".join(f"{name} {sizes[name]}" for name in NAMES if sizes[name] > 1) or "1"
