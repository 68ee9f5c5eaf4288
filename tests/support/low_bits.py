"""Reference dequantisation of formats with codebooks per output and of lattice codes."""

from itertools import product

import numpy as np
from scipy.linalg import hadamard

from quire.ops.quant import e8p, four_bits
from quire.ops.quant.hadamard import signs


def dequantize(node, name: str) -> np.ndarray:
    """Dequantise a node's arrays to float64 [K, O], one value at a time."""
    K = int(np.prod(node.into))
    O = int(np.prod(node.out))  # noqa: E741 - a dimension
    out = np.zeros((K, O))
    if name.startswith("codebook"):
        table, outliers, outlier_columns = (
            np.reshape(x, (len(x), O)) for x in (node.table, node.apart, node.columns)
        )
        codes = four_bits.split(np.asarray(node.codes), K)
        for o in range(O):
            out[:, o] = table[codes[:, o], o]
            out[outlier_columns[:, o], o] = outliers[:, o]
        return out
    table = e8p.table()
    scale = node.scale.reshape(-1).astype(np.float64)

    def point(code: int) -> np.ndarray:
        point_values = table[code & 255].astype(np.float64)
        for i in range(7):
            point_values[i] *= -1 if code >> (8 + i) & 1 else 1
        point_values[7] *= 1 if point_values.sum() % 2 == 0 else -1
        return point_values + (0.25 if code >> 15 else -0.25)

    for g, o in product(range(K // 8), range(O)):
        lattice_point = point(int(node.codes[g, o]))
        if node.rest is not None:
            lattice_point = lattice_point + point(int(node.rest[g, o])) / 4
        out[8 * g : 8 * g + 8, o] = lattice_point * scale[o]
    block = K & -K
    H = np.kron(np.eye(K // block), hadamard(block)) / block**0.5
    return (H @ out) * signs(K)[:, None]
