"""What the three GEMMs of a differentiable product must give, from the independent quantiser.

With the canonical lhs (*b, m, k), rhs (*b, n, k) and the cotangent g (*b, m, n), each GEMM is
a · bᵀ over the last axis of both, one row of a table:

    y    a = lhs,  b = rhs              (m, n)
    dx   a = g,    b = rhsᵀ             (m, k)
    dw   a = gᵀ,   b = lhsᵀ             (n, k)

Each operand is quantised along the axis that its GEMM contracts (contract, line 9), by
`oracle.quantize_np`. Nothing here asks the library what it did: recipe, roles and accumulation are
what it was meant to do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats
from jax_fp8.accumulation import PerGemm
from jax_fp8.array import ScaledArray
from jax_fp8.config import Execution
from jax_fp8.emulation.machines import MACHINES
from jax_fp8.recipes import Recipe, Role, resolve_tile
from jax_fp8.scaled import scaled_dot_general
from jax_fp8.testing import oracle
from jax_fp8.testing.operand import Operand
from jax_fp8.testing.window import independent_error, output_error

__all__ = ["TENSORS", "Intent", "Product", "products_of"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Axes = tuple[int, ...]

#: Names of the result and of both gradients, in the order of `Form.indices` 2, 0, 1.
TENSORS: Final = ("y", "dx", "dw")
#: Largest product of sizes for which one FMA at a time is emulated in NumPy.
_CHAIN_SIZE: Final = 1 << 18
#: eps and smallest subnormal of results.
_OUTPUTS: Final = {
    "float32": (2.0**-23, 2.0**-149),
    "bfloat16": (2.0**-7, 2.0**-133),
    "float16": (2.0**-10, 2.0**-24),
}
#: Half the distance between bfloat16 neighbours, relative.
_BF16_ROUNDOFF: Final = 2.0**-8


@dataclasses.dataclass(frozen=True)
class Intent:
    """What an op is meant to do.

    Attributes:
      recipe: formats, tiles and options.
      roles: of lhs and rhs.
      executions: accumulation of forward pass, dgrad and wgrad.
      key: for stochastic rounding, else None.
    """

    recipe: Recipe
    roles: tuple[Role, Role]
    executions: PerGemm[Execution]
    key: jax.Array | None = None

    def gradient_execution(self, side: int) -> Execution:
        """Accumulation of the gradient of `side`."""
        weight = self.roles[side] == "weight"
        return self.executions.wgrad if weight else self.executions.dgrad

    def is_fp8_gradient(self, side: int) -> bool:
        """Whether the gradient of `side` is an FP8 GEMM."""
        return self.recipe.weight_gradient == "fp8" or self.roles[side] != "weight"


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """One GEMM: a · bᵀ, summed over the batch dims `reduced` too.

    Attributes:
      tensor: "y", "dx" or "dw".
      which: index of the tensor in a `Form`: 2, 0 or 1.
      a, b: operands.
      reduced: batch dims, counted from the last of an operand, that are summed over.
      dtype: of the result.
      execution: how it adds up.
      fp8: False for a product of bfloat16 operands that XLA computes.
      masked: where the result must be zero (saturated under ste="mask_saturated"), or None.
    """

    tensor: str
    which: int
    a: Operand
    b: Operand
    reduced: Axes
    dtype: np.dtype[Any]
    execution: Execution
    fp8: bool = True
    masked: Array | None = None

    @property
    def k(self) -> int:
        """Products that are added up for each element."""
        shape = np.broadcast_shapes(self.a.real.shape[:-2], self.b.real.shape[:-2])
        k = self.a.real.shape[-1]
        return int(k * np.prod([shape[d + 2] for d in self.reduced], dtype=np.int64))

    def multiply(self, a: Float64, b: Float64) -> Float64:
        """a · bᵀ in float64 of arrays in the place of the operands."""
        out = np.matmul(a, np.swapaxes(b, -1, -2))
        if self.reduced:
            out = out.sum(axis=self.reduced, keepdims=True)
        return np.where(self.masked, 0.0, out) if self.masked is not None else out

    @property
    def operands_used(self) -> tuple[Float64, Float64]:
        """What the GEMM multiplies: dequantised, or rounded to bfloat16."""
        if self.fp8:
            return self.a.dequantised, self.b.dequantised
        bf16 = ml_dtypes.bfloat16
        a, b = (x.real.astype(bf16).astype(np.float64) for x in (self.a, self.b))
        return a, b

    @functools.cached_property
    def exact(self) -> Float64:
        """The product of the unquantised operands."""
        return self.multiply(self.a.exact, self.b.exact)

    @functools.cached_property
    def quantised(self) -> Float64:
        """The product of the quantised operands."""
        return self.multiply(*self.operands_used)

    @functools.cached_property
    def sums_bound(self) -> Float64:
        """Largest |result - quantised|: accumulation and the rounding of the result."""
        a, b = (np.abs(x) for x in self.operands_used)
        error = self._relative_sum_error() * self.multiply(a, b) + 2.0**-140
        eps, tiny = _OUTPUTS[self.dtype.name]
        return error + 0.5 * eps * (np.abs(self.quantised) + error) + 0.5 * tiny

    @functools.cached_property
    def bound(self) -> Float64:
        """Largest |result - exact|, rigorous: rounding of both operands, then `sums_bound`."""
        if self.fp8:
            da, db = self.a.rounding_bound, self.b.rounding_bound
        else:
            da, db = (_BF16_ROUNDOFF * np.abs(x.exact) + 2.0**-134 for x in (self.a, self.b))
        a, b = np.abs(self.a.exact), np.abs(self.b.exact)
        return self.multiply(da, b) + self.multiply(a, db) + self.multiply(da, db) + self.sums_bound

    @functools.cached_property
    def independent_error(self) -> tuple[float, float]:
        """‖result - exact‖ that independent rounding errors make, and its relative deviation."""
        error, deviation = independent_error(self.a.exact, self.b.exact, *self.operands_used)
        if error == 0:
            return 0.0, 0.0
        rest = output_error(self.dtype, float(np.linalg.norm(self.exact)))
        if self.execution.accumulation not in ("native", "fp32") and self.expected is not None:
            rest = float(np.linalg.norm(self.expected.astype(np.float64) - self.quantised))
        return math.hypot(error, rest), deviation

    def _relative_sum_error(self) -> float:
        """c in |error of the sum| <= c · Σ |a||b|, see `oracle.gemm_bound_np` for FP32 sums."""
        u, k = 2.0**-24, self.k
        pieces = sum(-(-k // min(x.tile[1], max(k, 1))) for x in (self.a, self.b))
        pieces += k // self.execution.promotion_interval if self.execution.promotion_interval else 0
        machine = MACHINES.get(self.execution.accumulation)
        roundings = k + pieces + self.execution.split_k + 3
        if machine is None or machine.ignores_interval:
            return float(np.expm1(roundings * np.log1p(u)))
        # A step adds step products to the accumulator: each term is cut below the largest one, and
        # the sum is rounded; no term and no sum exceeds Σ |a||b|.
        steps = -(-k // machine.step) + pieces + self.execution.split_k
        aligned = machine.fraction_bits > 0
        cut = (machine.step + 1) * 2.0 ** (1 - machine.fraction_bits) if aligned else 0.0
        rounding = {"e8m13": 2.0**-13, "fp16": 2.0**-11, "bf16": 2.0**-8}
        last = next((v for name, v in rounding.items() if name in machine.rounding), 2.0**-23)
        return float(np.expm1(steps * (cut + last) + roundings * u))

    @functools.cached_property
    def expected(self) -> Array | None:
        """The bits of the result by `scaled_dot_general` on the oracle's codes.

        None where no model says which: of XLA's bfloat16 dot, and of native kernels but the CPU's.
        Small ones that add up in FP32 come from NumPy alone, one FMA at a time.
        """
        native = self.execution.accumulation == "native"
        if not self.fp8 or (native and jax.default_backend() != "cpu"):
            return None
        (a, a_scale, a_tile), (b, b_scale, b_tile) = (self._folded(x) for x in (self.a, self.b))
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        machine = self.execution.accumulation
        if self._is_small(a, b) and machine in ("native", "fp32") and self.execution.split_k == 1:
            out = oracle.gemm_chain_np(a, b, a_scale, b_scale, a_tile, b_tile).astype(self.dtype)
        else:
            sides = []
            for codes, scale, tile in ((a, a_scale, a_tile), (b, b_scale, b_tile)):
                codes, scale = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (codes, scale))
                sides.append(self._scaled_array(codes, scale, tile))
            rank = len(batch)
            out = np.asarray(
                scaled_dot_general(
                    sides[0],
                    sides[1],
                    (((rank + 1,), (rank + 1,)), (tuple(range(rank)), tuple(range(rank)))),
                    self.dtype,
                    accumulation="fp32" if machine == "native" else machine,
                    promotion_interval=self.execution.promotion_interval or None,
                    split_k=self.execution.split_k,
                )
            )
        return (
            np.where(self.masked, np.zeros((), out.dtype), out) if self.masked is not None else out
        )

    def _is_small(self, a: Array, b: Array) -> bool:
        return a.size * b.shape[-2] <= _CHAIN_SIZE and b.size * a.shape[-2] <= _CHAIN_SIZE

    def _scaled_array(self, codes: Array, scale: Array, tile: tuple[int, int]) -> ScaledArray:
        machine = MACHINES.get(self.execution.accumulation)
        if machine is not None and machine.scales_inside:
            scale = scale.astype(formats.E8M0)
        return ScaledArray(jnp.asarray(codes), jnp.asarray(scale), tile)

    def _folded(self, x: Operand) -> tuple[Array, Array, tuple[int, int]]:
        """Codes, scale and tile with the batch dims that are summed over laid along k.

        Each example is padded to where tiles of both operands end, so that no tile straddles two
        examples; a tile that covers all of an example covers the padding too.
        """
        codes, scale = x.quantised
        if not self.reduced:
            return codes, scale, x.tile
        size = codes.shape[-1]
        unit = math.lcm(*(y.tile[1] for y in (self.a, self.b) if y.tile[1] < size))
        padded = math.ceil(size / unit) * unit
        tile = (x.tile[0], x.tile[1] if x.tile[1] < size else padded)
        shape = np.broadcast_shapes(self.a.real.shape[:-2], self.b.real.shape[:-2])
        codes = np.broadcast_to(codes, (*shape, *codes.shape[-2:]))
        scale = np.broadcast_to(scale, (*shape, *scale.shape[-2:]))
        codes = np.pad(codes.view(np.uint8), _behind(codes, padded)).view(codes.dtype)
        scale = np.pad(scale, _behind(scale, padded // tile[1]))
        return _lay_along_k(codes, self.reduced), _lay_along_k(scale, self.reduced), tile


def _behind(x: Array, size: int) -> list[tuple[int, int]]:
    """Padding of the last dim up to `size`."""
    return [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]


def _lay_along_k(x: Array, dims: Axes) -> Array:
    """(*b, rows, k) → (*b, rows, examples · k), where the batch dims `dims` become 1."""
    moved = np.moveaxis(x, [x.ndim + d for d in dims], range(x.ndim - 1 - len(dims), x.ndim - 1))
    flat = moved.reshape(*moved.shape[: x.ndim - 1 - len(dims)], -1)
    return np.expand_dims(flat, [x.ndim + d for d in dims])


def products_of(intent: Intent, lhs: Array, rhs: Array, g: Array) -> tuple[Product, ...]:
    """The three GEMMs of canonical operands and cotangent: y, dx, dw.

    Args:
      intent: what the op is meant to do.
      lhs: (*b, m, k) in the dtype of the user's operand.
      rhs: (*b, n, k) likewise.
      g: (*b, m, n) in the dtype of the result.
    """
    recipe, (lhs_role, rhs_role) = intent.recipe, intent.roles
    noise = _noise(intent, g)
    operand = functools.partial(Operand, recipe=recipe)
    forward = Product(
        "y", 2, operand(lhs, lhs_role), operand(rhs, rhs_role), (), g.dtype,
        intent.executions.forward,
    )  # fmt: skip
    out = [forward]
    for side, own, other, ct in ((0, lhs, rhs, g), (1, rhs, lhs, _turn(g))):
        bits = noise[side]
        if bits is not None and side == 1:
            bits = _turn(bits)
        reduced = tuple(i - g.ndim for i in range(g.ndim - 2) if own.shape[i] == 1 < g.shape[i])
        out.append(
            Product(
                TENSORS[side + 1],
                side,
                operand(ct, "gradient", bits=bits),
                operand(_turn(other), intent.roles[1 - side]),
                reduced,
                own.dtype,
                intent.gradient_execution(side),
                fp8=intent.is_fp8_gradient(side),
                masked=_masked((forward.a, forward.b)[side]),
            )
        )
    return tuple(out)


def _turn(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _masked(x: Operand) -> Array | None:
    scale = x.recipe.static_scale(x.role)
    if x.recipe.ste == "pass" or scale is None:
        return None
    quotient = np.abs(x.real.astype(np.float32) / np.float32(scale))
    masked: Array = quotient >= x.format.saturation_threshold
    return masked


def _noise(intent: Intent, g: Array) -> tuple[Array | None, Array | None]:
    """uint32 of g.shape for the cotangent's copy in the gradient of lhs and of rhs.

    The bits are those that the library draws, copy by copy; how they round is the oracle's affair.
    """
    if intent.key is None:
        return None, None
    rows, k = intent.recipe.tile("gradient")
    tiles = [resolve_tile((rows, k), g.shape), resolve_tile((k, rows), g.shape)]
    used = [tile for side, tile in enumerate(tiles) if intent.is_fp8_gradient(side)]
    copies = list(dict.fromkeys(used))
    drawn: list[Array | None] = [None, None]
    for side, tile in enumerate(tiles):
        if tile in copies:
            key = jax.random.fold_in(intent.key, copies.index(tile))
            drawn[side] = np.asarray(jax.random.bits(key, g.shape, jnp.uint32))
    return drawn[0], drawn[1]
