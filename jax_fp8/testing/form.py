"""How a function of two arrays is an FP8 GEMM: which element of each array goes where.

From the jaxpr of the forward pass alone, so it serves matmul, dot_general and einsum in any layout,
and functions whose derivative is somebody else's (and perhaps wrong).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8._compat import enable_x64
from jax_fp8.array import scale_shape
from jax_fp8.gemm import gemm_p
from jax_fp8.quantize_primitive import quantize_p
from jax_fp8.testing.replay import IDENTITY_RULES, replay

__all__ = ["Form", "form_of"]

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Form:
    """The canonical GEMM y (*b, m, n) = lhs (*b, m, k) · rhs (*b, n, k) inside a function.

    Attributes:
      lhs: flat index into the function's first array for each element of the canonical lhs.
      rhs: the same for the second array and the canonical rhs.
      out: the same for the function's result and the canonical result.
      shapes: of the function's first array, second array and result.
    """

    lhs: Array
    rhs: Array
    out: Array
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def indices(self) -> tuple[Array, Array, Array]:
        """`lhs`, `rhs` and `out`."""
        return self.lhs, self.rhs, self.out

    def canonical(self, which: int, x: npt.ArrayLike) -> Array:
        """Canonical matrix of an array that lies as operand 0, operand 1 or the result (2) does."""
        return np.asarray(x).reshape(-1)[self.indices[which]]

    def original(self, which: int, x: Array) -> Array:
        """The array whose canonical matrix is x."""
        out = np.empty(x.size, x.dtype)
        out[self.indices[which].reshape(-1)] = x.reshape(-1)
        return out.reshape(self.shapes[which])

    def index(self, which: int, at: tuple[int, ...]) -> tuple[int, ...]:
        """Index in the original array of an element of the canonical matrix."""
        flat = np.unravel_index(int(self.indices[which][at]), self.shapes[which])
        return tuple(int(i) for i in flat)


def form_of(op: Callable[..., Any], x: Any, w: Any) -> Form:
    """Finds the one FP8 GEMM in op(x, w).

    Raises:
      ValueError: there is none, or more than one, or something else happens to the operands.

    >>> import jax_fp8 as fp8
    >>> x, w = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((3, 2), "float32")
    >>> form_of(fp8.matmul, x, w).rhs.tolist()  # (n, k)
    [[0, 2, 4], [1, 3, 5]]
    """
    shapes = (tuple(x.shape), tuple(w.shape), tuple(jax.eval_shape(op, x, w).shape))
    found: list[tuple[Any, Any]] = []

    def record(
        lhs: Any, rhs: Any, *scales: Any, lhs_axis: int, rhs_axis: int, **params: Any
    ) -> Any:
        k_last = [m if axis == -1 else np.swapaxes(m, -1, -2)
                  for m, axis in ((lhs, lhs_axis), (rhs, rhs_axis))]  # fmt: skip
        found.append((np.asarray(k_last[0]), np.asarray(k_last[1])))
        a, b = k_last
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-2])
        return jnp.arange(int(np.prod(shape)), dtype=jnp.float64).reshape(shape)

    def same(x: Any, *rest: Any, tiles: Any, rounding: str, **params: Any) -> list[Any]:
        if len(rest) > (rounding == "stochastic"):
            return [x]
        return [y for t in tiles for y in (x, jnp.ones(scale_shape(x.shape, (1, *t)), x.dtype))]

    with enable_x64():
        counted = [np.arange(int(np.prod(s)), dtype=np.float64).reshape(s) for s in shapes[:2]]
    rules = {**IDENTITY_RULES, gemm_p: record, quantize_p: same}
    evaluate = replay(op, rules, x, w)
    with enable_x64():
        out = np.asarray(evaluate(*counted))
    if len(found) != 1:
        raise ValueError(
            f"check_vjp: op runs {len(found)} FP8 GEMMs; give a function of two arrays with one"
        )
    lhs, rhs = (m.astype(np.int64) for m in found[0])
    source = out.reshape(-1).astype(np.int64)
    batch = np.broadcast_shapes(lhs.shape[:-2], rhs.shape[:-2])
    sizes = (counted[0].size, counted[1].size, source.size)
    for name, index, size in zip(
        ("lhs", "rhs", "the result"), (lhs, rhs, source), sizes, strict=True
    ):
        if index.size != size or (np.sort(index.reshape(-1)) != np.arange(size)).any():
            raise ValueError(
                f"check_vjp: op does more to {name} than to move its elements; give the function "
                "of what enters and leaves the FP8 GEMM"
            )
    inverse = np.empty_like(source)
    inverse[source] = np.arange(source.size)
    return Form(lhs, rhs, inverse.reshape(*batch, lhs.shape[-2], rhs.shape[-2]), shapes)
