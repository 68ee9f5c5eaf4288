"""The tasks that the processors of an attention kernel take, as a list."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.attention.hopper_kernel import task
from quire.ops.attention.hopper_kernel.task import CutContext, KernelShape, Plan, Task


def tasks_of(shape: KernelShape, plan: Plan) -> list[list[Task]]:
    """Those of each processor, by the code that the kernel runs."""
    return read(shape, plan, lambda held, one: Task(*map(int, one)))


def contexts_of(shape: KernelShape, plan: Plan) -> list[list[CutContext]]:
    """Those of the same tasks; of one that is whole it says nothing."""
    return read(
        shape, plan, lambda held, one: CutContext(*map(int, task.read_context(shape, held, one)))
    )


def read(shape: KernelShape, plan: Plan, take) -> list[list[Any]]:
    """What is taken of each task of each processor, without a kernel."""
    held = jax.tree.map(np.asarray, plan)
    found = []

    def each(first, last, body, carry):
        for n in range(int(first), int(last)):
            carry = body(np.int32(n), carry)
        return carry

    plain = {
        "axis_index": None,
        "fori_loop": each,
        "div": lambda a, b: a // b,
        "rem": lambda a, b: a % b,
    }
    plain_numbers: dict[str, Any] = {"int32": np.int32, "where": np.where}
    for processor in range(shape.processors):
        mine: list[Any] = []
        plain["axis_index"] = lambda _, at=processor: at
        with mock.patch.multiple(task.lax, **plain), mock.patch.multiple(jnp, **plain_numbers):
            task.each_task(
                shape, held, lambda one, step, mine=mine: mine.append(take(held, one)) or step
            )
        found.append(mine)
    return found
