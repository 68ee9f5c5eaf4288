"""The devices that compute one step together, as the code that each of them runs sees them."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Axis:
    """Devices that each have a part of something; a single one has it whole, and needs nobody.

    They may lie along several axes of the mesh, the first of which changes the slowest.
    """

    name: str | tuple[str, ...] = ""
    size: int = 1

    def index(self):
        """Which of them this one is."""
        return lax.axis_index(self.name) if self.size > 1 else 0

    def sum(self, x):
        """What all of them have, added up."""
        return lax.psum(x, self.name) if self.size > 1 else x

    def gather(self, x):
        """What each of them has, one after the other: a leading axis more."""
        return lax.all_gather(x, self.name) if self.size > 1 else jnp.asarray(x)[None]

    def join(self, x):
        """What all of them have, in one: the leading axis is longer."""
        return lax.all_gather(x, self.name, tiled=True) if self.size > 1 else x

    def part(self, x):
        """Of what all have, this one's part of the leading axis."""
        each = x.shape[0] // self.size
        return lax.dynamic_slice_in_dim(x, self.index() * each, each) if self.size > 1 else x

    def exchange(self, x):
        """Of [n, ...] the first goes to the first of them, and so on; what comes lies in the order of the senders."""
        return lax.all_to_all(x, self.name, 0, 0) if self.size > 1 else x

    def __mul__(self, other: "Axis") -> "Axis":
        """Those of both."""
        if 1 in (self.size, other.size):
            return other if self.size == 1 else self
        names = [(axis.name,) if isinstance(axis.name, str) else axis.name for axis in (self, other)]
        return Axis(names[0] + names[1], self.size * other.size)


WHOLE = Axis()


@dataclass(frozen=True)
class Team:
    """`tensor`: parts of heads, of columns and of the vocabulary. `expert`: whole experts.

    `context`: parts of every page; and where a step is worth it, parts of its rows: then `rows` is the same. Along
    `apart` are replicas, which have rows of their own. All but those of `tensor` share the experts.
    """

    tensor: Axis = WHOLE
    expert: Axis = WHOLE
    context: Axis = WHOLE
    rows: Axis = WHOLE
    apart: Axis = WHOLE

    @property
    def experts(self) -> Axis:
        """All that share the experts."""
        return self.apart * self.context * self.expert

    @property
    def alike(self) -> Axis:
        """Those of them that have the same rows as this one."""
        return self.expert if self.rows.size > 1 else self.context * self.expert

    def sum(self, x):
        """What those with the same rows have, of experts and of their columns, added up at once."""
        both = self.tensor * self.alike
        return both.sum(x)


ALONE = Team()
