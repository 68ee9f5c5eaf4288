"""The tasks of an attention kernel's processors as lists."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from quire.ops.attention.hopper_kernel import task
from quire.ops.attention.hopper_kernel.task import CutContext, KernelShape, Plan, Task


def tasks_of(shape: KernelShape, plan: Plan) -> list[list[Task]]:
    """The tasks of each processor, by the code that the kernel runs."""
    return read(shape, plan, lambda host_plan, packed_task: Task(*map(int, packed_task)))


def contexts_of(shape: KernelShape, plan: Plan) -> list[list[CutContext]]:
    """The cut contexts of the same tasks; meaningless for tasks that are not cut."""
    return read(
        shape,
        plan,
        lambda host_plan, packed_task: CutContext(
            *map(int, task.read_context(shape, host_plan, packed_task))
        ),
    )


def read(shape: KernelShape, plan: Plan, take) -> list[list[Any]]:
    """Apply `take` to each task of each processor on the host, without a kernel."""
    host_plan = jax.tree.map(np.asarray, plan)
    taken_by_processor = []

    def python_fori_loop(first, last, body, carry):
        for n in range(int(first), int(last)):
            carry = body(np.int32(n), carry)
        return carry

    python_lax = {
        "axis_index": None,
        "fori_loop": python_fori_loop,
        "div": lambda a, b: a // b,
        "rem": lambda a, b: a % b,
    }
    numpy_functions: dict[str, Any] = {"int32": np.int32, "where": np.where}
    for processor in range(shape.processors):
        task_values: list[Any] = []
        python_lax["axis_index"] = lambda _, at=processor: at
        with (
            mock.patch.multiple(task.lax, **python_lax),
            mock.patch.multiple(jnp, **numpy_functions),
        ):
            task.each_task(
                shape,
                host_plan,
                lambda packed_task, step, task_values=task_values: (
                    task_values.append(take(host_plan, packed_task)) or step
                ),
            )
        taken_by_processor.append(task_values)
    return taken_by_processor
