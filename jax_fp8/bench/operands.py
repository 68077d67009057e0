"""Random operands of a GEMM in every dtype and layout, and results held against float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jax_fp8.array import ScaledArray
from jax_fp8.prepare import prepare
from jax_fp8.prepared import PreparedArray
from jax_fp8.quantize import quantize
from jax_fp8.recipes import BY_NAME

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "PREPARED",
    "Inputs",
    "Rotation",
    "Sample",
    "Weights",
    "float64_of",
    "relative_error",
]

#: Real dtypes of peers by the names in tables.
DTYPES: Final[dict[str, npt.DTypeLike]] = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
}
#: Order of the dims of the weights in memory, and the dim that is contracted.
LAYOUTS: Final = {"(N,K)": 1, "(K,N)": 0}
#: Weights that `prepare` laid out, which only our kernels take.
PREPARED: Final = "prepared"

#: The smallest page of the processors at hand.
_PAGE_BYTES: Final = 4096

Matrix = np.ndarray[Any, np.dtype[Any]]


class _Kept:
    """Makes things once; they go when their owner goes, which a cache of methods would prevent."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Any] = {}

    def _once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


class Inputs(_Kept):
    """(m, k) normal activations."""

    def __init__(self, m: int, k: int, seed: int) -> None:
        super().__init__()
        self.array = _normal((m, k), seed)

    def real(self, dtype: str) -> jax.Array:
        return self._once(("real", dtype), lambda: jnp.asarray(self.array.astype(DTYPES[dtype])))

    def scaled(self, recipe: str) -> ScaledArray:
        return self._once(("scaled", recipe), lambda: _quantized(self.array, recipe, "input"))


class Weights(_Kept):
    """Normal weights; cold ones are so many equal copies that they fill a footprint.

    Args:
      n: columns of the product.
      k: contracted size.
      seed: of the data.
      footprint_bytes: that the copies of one dtype and layout fill together; 0 is one copy.
    """

    def __init__(self, n: int, k: int, seed: int, footprint_bytes: int = 0) -> None:
        super().__init__()
        self.array = _normal((n, k), seed + 1)
        self.footprint_bytes = footprint_bytes

    def copies(self, itemsize: int) -> int:
        """How many matrices of this many bytes an element fill the footprint."""
        return max(1, math.ceil(self.footprint_bytes / (self.array.size * itemsize)))

    def turns(self, what: str, layout: str) -> Iterator[int]:
        """Which copy comes next.

        All contenders that read the same arrays take turns in them: if each went round by itself,
        one would read what another has just brought into the cache.

        Args:
          what: dtype or recipe.
          layout: of `LAYOUTS`.
        """
        itemsize = np.dtype(DTYPES[what]).itemsize if what in DTYPES else 1
        count = self.copies(itemsize)
        return self._once(("turns", what, layout), lambda: itertools.cycle(range(count)))

    def real(self, dtype: str, layout: str) -> list[jax.Array]:
        return self._once(("real", dtype, layout), lambda: self._real(dtype, layout))

    def scaled(self, recipe: str, layout: str) -> list[ScaledArray]:
        return self._once(("scaled", recipe, layout), lambda: self._scaled(recipe, layout))

    def prepared(self, recipe: str) -> list[PreparedArray]:
        return self._once(("scaled", recipe, PREPARED), lambda: self._prepared(recipe))

    def _real(self, dtype: str, layout: str) -> list[jax.Array]:
        laid = self.array if layout == "(N,K)" else np.ascontiguousarray(self.array.T)
        one = jnp.asarray(laid.astype(DTYPES[dtype]))
        return [one, *(jnp.array(one, copy=True) for _ in range(1, self.copies(one.itemsize)))]

    def _scaled(self, recipe: str, layout: str) -> list[ScaledArray]:
        q = _quantized(self.array, recipe, "weight")
        if layout == "(K,N)":
            values, scale = (jnp.asarray(np.asarray(x).T.copy()) for x in (q.values, q.scale))
            q = ScaledArray(values, scale, q.tile[::-1])
        more = (jnp.array(q.values, copy=True) for _ in range(1, self.copies(1)))
        return [q, *(ScaledArray(values, q.scale, q.tile) for values in more)]

    def _prepared(self, recipe: str) -> list[PreparedArray]:
        one = prepare(_quantized(self.array, recipe, "weight"), k_axis=-1)
        more = (jnp.array(one.values, copy=True) for _ in range(1, self.copies(1)))
        return [one, *(dataclasses.replace(one, values=values) for values in more)]


class Rotation:
    """A call on the copy of the weights whose turn it is.

    Args:
      call: maps (lhs, weights) to a result.
      lhs: the other operand.
      weights: the copies.
      turns: which one is next.
      memory: the array of each copy, for `touch`.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        lhs: Any,
        weights: Sequence[Any],
        turns: Iterator[int],
        memory: Sequence[jax.Array],
    ) -> None:
        self._call, self._lhs, self._weights, self._turns = call, lhs, weights, turns
        self._pages = [np.asarray(x).view(np.uint8).reshape(-1)[::_PAGE_BYTES] for x in memory]
        self._next: int | None = None

    def touch(self) -> None:
        """Takes the next copy, and reads one byte of each of its pages.

        Systems reclaim or unmap memory that nobody has used for seconds, as it is between the turns
        of a copy here; weights that are used all the time are there. The rest stays cold.
        """
        self._next = next(self._turns)
        self._pages[self._next].sum()

    def __call__(self) -> Any:
        if self._next is None:
            self._next = next(self._turns)
        weights, self._next = self._weights[self._next], None
        return self._call(self._lhs, weights)


def _normal(shape: tuple[int, int], seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _quantized(array: Matrix, recipe: str, role: Any) -> ScaledArray:
    own = BY_NAME[recipe]
    return quantize(
        jnp.asarray(array), own.format(role), own.tile(role), power_of_two=own.power_of_two
    )


def float64_of(x: Any, rows: Matrix) -> Matrix:
    """Some rows of an (r, k) operand as float64; a scaled one is dequantised, in NumPy.

    >>> float64_of(quantize(jnp.array([[1.0], [448.0]]), "e4m3"), np.array([1])).tolist()
    [[448.0]]
    """
    if not isinstance(x, ScaledArray):
        return np.asarray(x)[rows].astype(np.float64)
    tile = x.full_tile()
    scale = np.asarray(x.scale).astype(np.float64)
    columns = np.arange(x.shape[1]) // tile[1]
    values = np.asarray(x.values)[rows].astype(np.float64)
    return values * scale[np.ix_(rows // tile[0], columns)]


def relative_error(out: Matrix, exact: Matrix) -> float:
    """‖out − exact‖ / ‖exact‖, Frobenius norms.

    >>> relative_error(np.array([3.0, 4.5]), np.array([3.0, 4.0]))
    0.1
    """
    return float(np.linalg.norm(out - exact) / np.linalg.norm(exact))


class Sample:
    """Rows and columns of an (m, n) result, spread over it, that are computed in float64."""

    def __init__(self, m: int, n: int, rows: int = 8, columns: int = 32) -> None:
        self.rows = np.unique(np.linspace(0, m - 1, min(rows, m)).astype(int))
        self.columns = np.unique(np.linspace(0, n - 1, min(columns, n)).astype(int))

    def of(self, out: Any) -> Matrix:
        """The sample of a result, as float64."""
        return np.asarray(out)[np.ix_(self.rows, self.columns)].astype(np.float64)

    def check(
        self, call: Callable[[], Any], lhs: Any, rhs: Any, tolerance: float
    ) -> Callable[[], str]:
        """A check of a product against float64.

        Args:
          call: returns the (m, n) result.
          lhs: the (m, k) operand that it multiplies.
          rhs: the (n, k) operand.
          tolerance: largest relative error.
        """

        def check() -> str:
            exact = float64_of(lhs, self.rows) @ float64_of(rhs, self.columns).T
            error = relative_error(self.of(call()), exact)
            if error <= tolerance:
                return ""
            return (
                f"relative error {error:.2g} of {exact.size} results against float64, "
                f"expected at most {tolerance:g}"
            )

        return check
