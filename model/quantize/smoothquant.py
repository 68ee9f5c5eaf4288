"""SmoothQuant (arXiv 2211.10438): move outliers of activations into the weights."""

import numpy as np


def scales(X: np.ndarray, W: np.ndarray, a: float = 0.5) -> np.ndarray:
    """s_j = max |x_j|^a / max |w_j|^(1 - a); x_j is divided by it, w_j multiplied."""
    nonzero = (X > 0) & (W > 0)
    x, w = (np.where(nonzero, values, 1).astype(np.float64) for values in (X, W))
    s = x**a / w ** (1 - a)
    return np.where(nonzero, np.clip(s, 1e-5, 1e5), 1).astype(np.float32)
