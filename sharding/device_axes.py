"""The mesh as the code that runs on one of its devices sees it: collectives, named for what they give."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Axis:
    """Devices over which something is split. With a size of one it is not, and no method communicates.

    They may lie along several axes of the mesh, the first of which changes the slowest.
    """

    name: str | tuple[str, ...] = ""
    size: int = 1

    def index(self):
        """This device's number."""
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

    def part(self, x):
        """This device's part of the leading axis of an array that all devices have."""
        each = x.shape[0] // self.size
        return lax.dynamic_slice_in_dim(x, self.index() * each, each) if self.size > 1 else x

    def take(self, x, rows_R):
        """Some of all rows, of which each device has a part of the leading axis; zeros for those that there are not."""
        own = x.shape[0]
        at_R = rows_R - self.index() * own
        at_R = jnp.where(at_R < 0, own, at_R)  # a negative one would count from the end
        return self.sum(x.at[at_R].get(mode="fill", fill_value=0))

    def exchange(self, x):
        """Sends x[d] to device d, and gives what the devices sent to this one: [sender, ...]."""
        return lax.all_to_all(x, self.name, 0, 0) if self.size > 1 else x

    def __mul__(self, other: "Axis") -> "Axis":
        """The devices of both axes."""
        if 1 in (self.size, other.size):
            return other if self.size == 1 else self
        names = [(axis.name,) if isinstance(axis.name, str) else axis.name for axis in (self, other)]
        return Axis(names[0] + names[1], self.size * other.size)


UNSPLIT = Axis()


@dataclass(frozen=True)
class DeviceAxes:
    """What each axis of the mesh splits.

    `tensor` splits heads, columns and the vocabulary; `expert` splits the experts; `context` splits the positions of
    every page; `data` counts replicas, each with rows of its own. `rows` is `context` in steps whose rows are split
    over it too, and nothing in others. The experts are split over all axes but `tensor`.
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
        """Those of `experts` that have the same rows as this device."""
        return self.expert if self.rows.size > 1 else self.context * self.expert

    def sum(self, x):
        """The sum over the devices that have the same rows: of their experts, and of their columns of each."""
        both = self.tensor * self.same_rows
        return both.sum(x)


ONE_DEVICE = DeviceAxes()


def varies() -> str | None:
    """Why a sum's bits may depend on what is summed beside it."""
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        return None
    return "devices may add up their sums in an order that depends on the number of rows"
