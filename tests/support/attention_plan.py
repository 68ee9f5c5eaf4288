"""The tasks that the processors of an attention kernel take, as a list."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.attention.mosaic import task
from quire.ops.attention.mosaic.task import KernelShape, Plan, Task


def tasks_of(shape: KernelShape, plan: Plan) -> list[list[Task]]:
    """Those of each processor, by the code that the kernel runs."""
    held, found = jax.tree.map(np.asarray, plan), []

    def each(first, last, body, carry):
        for n in range(int(first), int(last)):
            carry = body(np.int32(n), carry)
        return carry

    plain = {"axis_index": None, "fori_loop": each, "div": lambda a, b: a // b, "rem": lambda a, b: a % b}
    plain_numbers: dict[str, Any] = {"int32": np.int32, "where": np.where}
    for processor in range(shape.processors):
        mine: list[Task] = []
        plain["axis_index"] = lambda _, at=processor: at
        with mock.patch.multiple(task.lax, **plain), mock.patch.multiple(jnp, **plain_numbers):
            task.each_task(shape, held, lambda one, step, mine=mine: mine.append(Task(*map(int, one))) or step)
        found.append(mine)
    return found
