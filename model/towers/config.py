"""What a vision tower computes."""

from dataclasses import dataclass

from ..config import ModelConfig


@dataclass(frozen=True)
class Merger:
    """Joins each square group of patches to one row of the decoder's width: a norm and an MLP."""

    dim: int  # of the MLP's hidden layer; 0: a matrix instead of an MLP
    out: int  # the decoder's width
    activation: str = "gelu"
    joins_first: bool = False  # the norm is over the joined patches, not over each
    norm_eps: float = 1e-6
    rms_norm: bool = False  # else the norm of the tower's layers
    scaled_norm: bool = True  # else an RMS norm without weights
    pools: bool = False  # a group's patches are averaged, not joined
    pool_scale: float = 1.0  # times the average
    standardizes: bool = False  # a bias is subtracted from it, and it is scaled
    joined_dim: int | None = None  # of joined patches after a matrix; None: there is no matrix
    bias: bool = True  # of the MLP


@dataclass(frozen=True)
class Tower:
    """A vision tower. Tokens of `model` are patches, in the order in which the merger joins them:
    group by group, row by row within a group.
    """

    model: ModelConfig  # the layers; their rotary embedding has two axes, row and column
    patch: int  # side of a patch, in pixels
    merge: int  # side of a group, in patches
    merger: Merger
    positions_side: int = 0  # side of the square of learned positions; 0: there are none
    positions_per_axis: int = 0  # learned positions of rows and of columns, whose sum is added
    centres_pixels: bool = False  # values of 0 to 1 become -1 to 1
    patch_bias: bool = True
    clips: bool = False  # each matrix of the layers clips its inputs and its outputs
    entry_norm: bool = False  # a norm before the first layer
    exit_norm: bool = False  # a norm after the last layer
    deepstack: tuple[int, ...] = ()  # layers whose output makes further rows
    deepstack_merger: Merger | None = None

    @property
    def group(self) -> int:
        """The number of patches that make up one row."""
        return self.merge * self.merge

    @property
    def patch_values(self) -> int:
        return self.patch * self.patch * 3
