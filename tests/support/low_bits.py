"""What codebooks by output and points of a lattice mean, one number at a time."""

from itertools import product

import numpy as np
from scipy.linalg import hadamard

from quire.ops.quant import e8p, four_bits
from quire.ops.quant.hadamard import signs


def meaning(node, name: str) -> np.ndarray:
    """[K, O] in float64, from a node's arrays one number at a time."""
    K = int(np.prod(node.into))
    O = int(np.prod(node.out))  # noqa: E741 - a dimension
    out = np.zeros((K, O))
    if name.startswith("codebook"):
        table, apart, columns = (
            np.reshape(x, (len(x), O)) for x in (node.table, node.apart, node.columns)
        )
        codes = four_bits.split(np.asarray(node.codes), K)
        for o in range(O):
            out[:, o] = table[codes[:, o], o]
            out[columns[:, o], o] = apart[:, o]
        return out
    table = e8p.table()
    scale = node.scale.reshape(-1).astype(np.float64)

    def point(code: int) -> np.ndarray:
        found = table[code & 255].astype(np.float64)
        for i in range(7):
            found[i] *= -1 if code >> (8 + i) & 1 else 1
        found[7] *= 1 if found.sum() % 2 == 0 else -1
        return found + (0.25 if code >> 15 else -0.25)

    for g, o in product(range(K // 8), range(O)):
        each = point(int(node.codes[g, o]))
        if node.rest is not None:
            each = each + point(int(node.rest[g, o])) / 4
        out[8 * g : 8 * g + 8, o] = each * scale[o]
    block = K & -K
    H = np.kron(np.eye(K // block), hadamard(block)) / block**0.5
    return (H @ out) * signs(K)[:, None]
