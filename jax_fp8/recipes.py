"""Recipes: which format each operand of a training GEMM gets, and what one scale covers.

A recipe answers three questions about a role ("input", "weight" or "gradient"): its format, its
tile on the canonical matrix (rows, k), where k is the axis that a GEMM contracts, and a scale known
beforehand, if any. A new recipe is a subclass with another `tile`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from jax_fp8 import formats
from jax_fp8.accumulation import UNSET, PerGemm, Sums, Unset
from jax_fp8.formats import Format

__all__ = [
    "BlockScaling",
    "MXScaling",
    "Recipe",
    "RowScaling",
    "StaticScaling",
    "TensorScaling",
    "TileScaling",
]

Role = Literal["input", "weight", "gradient"]
Tile = tuple[int, int]

ROLES: Final[tuple[Role, ...]] = ("input", "weight", "gradient")
#: Roles that an operand of a public call can have; "gradient" is what the derivative rule
#: quantises.
OPERAND_ROLES: Final[tuple[Role, ...]] = ("input", "weight")
#: Values of the options of a recipe.
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "ste": ("pass", "mask_saturated"),
    "residuals": ("fp8", "high_precision"),
    "weight_gradient": ("fp8", "bfloat16"),
    "rounding": ("nearest", "stochastic"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. Subclasses say what one scale covers.

    Attributes:
      input_format: format of inputs.
      weight_format: format of weights.
      gradient_format: format of gradients.
      power_of_two: round scales up to powers of two.
      ste: straight-through estimator: "pass" hands gradients unchanged through the quantiser;
        "mask_saturated" makes them zero where the forward pass saturated, that is where
        |x / scale| rounds above the largest value (only a scale known beforehand can be too small).
      residuals: what the backward pass keeps of an operand: "fp8", its copy quantised along the
        backward axis (1 byte per element), or "high_precision", the operand itself, quantised
        again in the backward pass.
      weight_gradient: "fp8", or "bfloat16": the gradient of a weight is a bfloat16 dot of the
        unquantised input and cotangent, as torchao's recipe rowwise_with_gw_hp.
      rounding: how gradients are rounded to FP8: "nearest", or "stochastic", which is unbiased and
        needs `key=` in the call. Inputs and weights are always rounded to nearest.
      accumulation: name of the accumulation model of `emulation.MACHINES` that CPU kernels emulate,
        or "native"; a `PerGemm` says it for forward pass, dgrad and wgrad apart. Contexts
        (`emulate`) and arguments of a call go before a recipe; so for the next two.
      promotion_interval: k after which a short accumulator is added to an FP32 sum; None is never.
      split_k: parts of k that are added up apart from each other.
    """

    input_format: Format = formats.E4M3FN
    weight_format: Format = formats.E4M3FN
    gradient_format: Format = formats.E5M2
    power_of_two: bool = False
    ste: Literal["pass", "mask_saturated"] = "pass"
    residuals: Literal["fp8", "high_precision"] = "fp8"
    weight_gradient: Literal["fp8", "bfloat16"] = "fp8"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    accumulation: str | PerGemm[str] | Unset = UNSET
    promotion_interval: int | PerGemm[int | None] | Unset | None = UNSET
    split_k: int | PerGemm[int] | Unset = UNSET

    tiles: ClassVar[Mapping[Role, Tile]] = {}

    def __post_init__(self) -> None:
        name = type(self).__name__
        for role in ROLES:
            field = f"{role}_format"
            fmt = formats.lookup(getattr(self, field), call=f"{name}: {field}")
            object.__setattr__(self, field, fmt)
        for option, values in OPTIONS.items():
            given = getattr(self, option)
            if given not in values:
                raise ValueError(
                    f"{name}: {option} is {given!r}; it must be one of {', '.join(values)}"
                )
        self.sums.checked(name)

    @property
    def sums(self) -> Sums:
        """How the GEMMs add up."""
        return Sums(self.accumulation, self.promotion_interval, self.split_k)

    def format(self, role: Role) -> Format:
        """Format of the codes of an operand with this role."""
        fmt: Format = getattr(self, f"{role}_format")
        return fmt

    def tile(self, role: Role) -> Tile:
        """Rows and k that one scale covers, on the matrix (rows, k); -1 is all of them."""
        return self.tiles[role]

    def static_scale(self, role: Role) -> float | None:
        """Scale of the whole operand that is known beforehand, or None to compute it from amax."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorScaling(Recipe):
    """One scale per operand, from the amax of this very call (current scaling).

    The cheapest. Values more than 2^18 below the largest become zero in E4M3.
    """

    tiles: ClassVar[Mapping[Role, Tile]] = {
        "input": (-1, -1),
        "weight": (-1, -1),
        "gradient": (-1, -1),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowScaling(Recipe):
    """One scale per row of inputs and gradients, and per output column of weights.

    Prefer it where rows (tokens) differ much in size. Operands are quantised along both axes.
    """

    tiles: ClassVar[Mapping[Role, Tile]] = {
        "input": (1, -1),
        "weight": (1, -1),
        "gradient": (1, -1),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """1×128 tiles along k for inputs and gradients, 128×128 for weights: the default.

    Tiles as in DeepSeek-V3 (arXiv 2412.19437), gradients in E5M2.
    """

    tiles: ClassVar[Mapping[Role, Tile]] = {
        "input": (1, 128),
        "weight": (128, 128),
        "gradient": (1, 128),
    }


@dataclasses.dataclass(frozen=True)
class TileScaling(Recipe):
    """The same tile for every operand: `rows` × `k` on the matrix (rows, k).

    Where rows differ from k, operands are quantised along both axes. A tile of many rows mixes
    tokens of different size; see BlockScaling where that matters.

    Attributes:
      rows: rows (tokens or output columns) that one scale covers, -1 for all.
      k: contracted elements that one scale covers, -1 for all.

    >>> TileScaling(128, 32).tile("weight")
    (128, 32)
    """

    rows: int = 128
    k: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in (self.rows, self.k):
            if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
                raise ValueError(
                    f"TileScaling: the tile is {self.rows!r} × {self.k!r}; sizes are integers >= "
                    "1, or -1 for a whole dim"
                )

    def tile(self, role: Role) -> Tile:
        return (self.rows, self.k)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXScaling(Recipe):
    """MX: 1×32 tiles along k with power-of-two scales, which an E8M0 byte holds.

    Scales are rounded up, 2^ceil(log2(amax / max)), so that nothing saturates; the rule of the OCP
    MX specification, floor(log2(amax)) - 8, saturates 12.5 % of uniform data. Scales are at least
    2^-126."""

    power_of_two: bool = True

    tiles: ClassVar[Mapping[Role, Tile]] = {
        "input": (1, 32),
        "weight": (1, 32),
        "gradient": (1, 32),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.power_of_two:
            raise ValueError("MXScaling: power_of_two is False; an E8M0 scale is a power of two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticScaling(Recipe):
    """Scales known beforehand: no amax, nothing to compute, and values that do not fit saturate.

    For models whose tensors have unit variance by construction (arXiv 2502.05967), and as the
    negative control "unscaled FP8".

    Attributes:
      input: dequantizing scale of inputs, a positive finite float.
      weight: dequantizing scale of weights.
      gradient: dequantizing scale of gradients.
    """

    input: float = 1.0
    weight: float = 1.0
    gradient: float = 1.0

    tiles: ClassVar[Mapping[Role, Tile]] = {
        "input": (-1, -1),
        "weight": (-1, -1),
        "gradient": (-1, -1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in ROLES:
            scale = getattr(self, role)
            if not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
                raise ValueError(
                    f"StaticScaling: the {role} scale is {scale!r}; it must be positive and finite"
                )
            object.__setattr__(self, role, float(scale))

    def static_scale(self, role: Role) -> float | None:
        scale: float = getattr(self, role)
        return scale


DEFAULT: Final[Recipe] = BlockScaling()

#: Recipes by the names that the command line takes.
BY_NAME: Final[Mapping[str, Recipe]] = {
    "tensor": TensorScaling(),
    "row": RowScaling(),
    "block": BlockScaling(),
    "tile": TileScaling(),
    "mx": MXScaling(),
    "static": StaticScaling(),
}


def check(recipe: Recipe | None, call: str) -> Recipe:
    """Returns the recipe, or the default for None; raises for anything else."""
    if recipe is None:
        return DEFAULT
    if isinstance(recipe, Recipe):
        return recipe
    names = ", ".join(f"{name}()" for name in __all__ if name != "Recipe")
    hint = " (an instance, not the class)" if isinstance(recipe, type) else ""
    raise TypeError(f"{call}: recipe is {recipe!r}; give a recipe such as {names}{hint}")


def resolve_tile(tile: Tile, shape: tuple[int, ...]) -> Tile:
    """Replaces -1 by the size of the dim, and limits a tile to the dim; sizes are at least 1."""
    rows, k = (max(size, 1) for size in shape[-2:])
    return (rows if tile[0] == -1 else min(tile[0], rows), k if tile[1] == -1 else min(tile[1], k))


def check_roles(roles: tuple[str, str], call: str) -> tuple[Role, Role]:
    """Raises unless `roles` is a pair of operand roles."""
    if len(tuple(roles)) != 2 or any(role not in OPERAND_ROLES for role in roles):
        raise ValueError(
            f"{call}: roles is {roles!r}; give one of {', '.join(OPERAND_ROLES)} for each operand"
        )
    lhs, rhs = roles
    return lhs, rhs  # type: ignore[return-value]
