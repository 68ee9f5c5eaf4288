"""Self-test cases of the delta rule kernel: sequences of one token and of many, against float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..gpu.self_test import Case, InLayers
from ..state_rows import StateRows

LARGEST_ERROR = 1e-5  # relative to float64
COUNTS = *[1] * 20, 37, 5, 70  # tokens of each sequence
KEYS = 2  # key heads


@dataclass(frozen=True)
class DeltaCase:
    """Compares the outputs and the stored memories."""

    kind: dict
    counts: tuple[int, ...] = COUNTS
    interpret: Any = None
    allowed: float = LARGEST_ERROR
    name: str = "rows and memories"

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        B = len(self.counts)
        T = sum(self.counts)
        H = self.kind["keys"]
        N = KEYS * self.kind["shared"]
        V = self.kind["values"]
        q_TKH, k_TKH = (rng.standard_normal((T, KEYS, H)) for _ in range(2))
        k_TKH /= np.linalg.norm(k_TKH, axis=-1, keepdims=True)
        v_TNV = rng.standard_normal((T, N, V))
        beta_TN = rng.uniform(0, 1, (T, N))
        decay_TN = rng.uniform(0.5, 1, (T, N, H) if self.kind["by_key"] else (T, N))
        arrays = [x.astype(np.float32) for x in (q_TKH, k_TKH, v_TNV, decay_TN, beta_TN)]
        memory_BNHV = rng.standard_normal((B + 1, N, H, V)).astype(np.float32)
        slots_B = rng.permutation(B + 1)[:B]
        is_first_step_B = rng.random(B) < 0.5
        memory_BNHV[slots_B[is_first_step_B]] = np.nan  # the state of an earlier sequence
        starts_B1 = np.concatenate(([0], np.cumsum(self.counts)))
        num_kept_B = rng.integers(0, np.array(self.counts) + 1)
        rows = StateRows(
            jnp.array(starts_B1, jnp.int32),
            jnp.array(slots_B, jnp.int32),
            jnp.array(is_first_step_B),
            jnp.array(num_kept_B, jnp.int32),
        )
        expected = in_float64(
            arrays,
            memory_BNHV,
            starts_B1,
            slots_B,
            is_first_step_B,
            num_kept_B,
            self.kind["corrects"],
        )
        return (
            (),
            (*map(jnp.asarray, arrays), jnp.asarray(memory_BNHV), rows),
            stack_results(*expected),
        )

    def run(self, donated, inputs):
        *arrays, rows = inputs
        return stack_results(
            *delta_rule(*arrays, rows, self.kind["corrects"], self.interpret)
        ), donated


def stack_results(out_TNV, memory_BNHV) -> Any:
    numbers = jnp if isinstance(out_TNV, jnp.ndarray) else np
    return numbers.concatenate([x.reshape(-1, out_TNV.shape[-1]) for x in (out_TNV, memory_BNHV)])


def cases(kind: dict) -> list[Case]:
    """The cases of the self-test."""
    return [DeltaCase(kind), InLayers(DeltaCase(kind))]


def delta_rule(*args):
    from .hopper_kernel import delta_rule

    return delta_rule(*args)


def in_float64(
    arrays, memory_BNHV, starts_B1, slots_B, is_first_step_B, num_kept_B, corrects: bool
):
    """(outputs, memories after the step), computed on the host."""
    q_TKH, k_TKH, v_TNV, decay_TN, beta_TN = (x.astype(np.float64) for x in arrays)
    out_TNV = np.zeros(v_TNV.shape)
    new_memory_BNHV = memory_BNHV.astype(np.float64)
    heads_per_key = v_TNV.shape[1] // q_TKH.shape[1]
    for b, slot in enumerate(slots_B):
        memory_NHV = (
            np.zeros(new_memory_BNHV.shape[1:]) if is_first_step_B[b] else new_memory_BNHV[slot]
        )
        for t in range(starts_B1[b], starts_B1[b + 1]):
            if t == starts_B1[b] + num_kept_B[b]:
                new_memory_BNHV[slot] = memory_NHV
            q_NH, k_NH = (np.repeat(x[t], heads_per_key, 0) for x in (q_TKH, k_TKH))
            memory_NHV = memory_NHV * decay_TN[t].reshape(len(k_NH), -1, 1)
            error_NV = v_TNV[t] - corrects * np.einsum("nh,nhv->nv", k_NH, memory_NHV)
            memory_NHV = memory_NHV + k_NH[..., None] * (beta_TN[t][:, None] * error_NV)[:, None]
            out_TNV[t] = np.einsum("nh,nhv->nv", q_NH, memory_NHV)
        if num_kept_B[b] == starts_B1[b + 1] - starts_B1[b]:
            new_memory_BNHV[slot] = memory_NHV
    return out_TNV, new_memory_BNHV
