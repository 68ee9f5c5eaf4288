"""Collectives over the axes of the mesh, for code that runs on one of its devices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Axis:
    """The devices that an array axis is split over.

    With a size of 1 nothing is split, and no method communicates. The devices may lie along several
    mesh axes, the first of which varies slowest.
    """

    name: str | tuple[str, ...] = ""
    size: int = 1

    def index(self):
        """This device's index."""
        return lax.axis_index(self.name) if self.size > 1 else 0

    def sum(self, x):
        """The sum of all devices' arrays."""
        if self.size == 1:
            return x
        with jax.named_scope(__name__):
            return lax.psum(x, self.name)

    def gather(self, x):
        """All devices' arrays, stacked along a new leading axis."""
        return lax.all_gather(x, self.name) if self.size > 1 else jnp.asarray(x)[None]

    def join(self, x):
        """All devices' arrays, concatenated along the leading axis."""
        return lax.all_gather(x, self.name, tiled=True) if self.size > 1 else x

    def local_slice(self, x):
        """This device's slice of the leading axis of a replicated array."""
        local_size = x.shape[0] // self.size
        return (
            lax.dynamic_slice_in_dim(x, self.index() * local_size, local_size)
            if self.size > 1
            else x
        )

    def take(self, x, rows_R):
        """Rows by global index from an array whose leading axis is split; zeros for indices out of
        range.
        """
        local_size = x.shape[0]
        local_R = rows_R - self.index() * local_size
        # a negative index would count from the end
        local_R = jnp.where(local_R < 0, local_size, local_R)
        return self.sum(x.at[local_R].get(mode="fill", fill_value=0))

    def exchange(self, x):
        """Send x[d] to device d, and return what the devices sent to this one: [sender, ...]."""
        return lax.all_to_all(x, self.name, 0, 0) if self.size > 1 else x

    def __mul__(self, right: "Axis") -> "Axis":
        """The devices of both axes."""
        if 1 in (self.size, right.size):
            return right if self.size == 1 else self
        names = [
            (axis.name,) if isinstance(axis.name, str) else axis.name for axis in (self, right)
        ]
        return Axis(names[0] + names[1], self.size * right.size)


UNSPLIT = Axis()


@dataclass(frozen=True)
class DeviceAxes:
    """The axes of the mesh, by what they split.

    `tensor` splits heads, columns and the vocabulary; `expert` the experts; `context` the positions
    of every page; `data` counts replicas with tokens of their own. `rows` is `context` in steps
    that also split tokens over it, and unsplit in other steps. The experts are split over all axes
    but `tensor`.
    """

    tensor: Axis = UNSPLIT
    expert: Axis = UNSPLIT
    context: Axis = UNSPLIT
    rows: Axis = UNSPLIT
    data: Axis = UNSPLIT

    @property
    def experts(self) -> Axis:
        """The devices that the experts are split over."""
        return self.data * self.context * self.expert

    @property
    def same_rows(self) -> Axis:
        """The devices of `experts` that have the same tokens as this device."""
        return self.expert if self.rows.size > 1 else self.context * self.expert

    def sum(self, x):
        """The sum over the devices that have the same tokens: over experts and columns."""
        devices = self.tensor * self.same_rows
        return devices.sum(x)


ONE_DEVICE = DeviceAxes()


def varies() -> str | None:
    """Why the bits of a sum may depend on the rest of the batch; None if they do not."""
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        return None
    return "devices may add up their sums in an order that depends on the number of rows"
