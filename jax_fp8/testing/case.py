"""One op under test: its arguments, what it is meant to do, and what it gave."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8.testing.form import Form
from jax_fp8.testing.products import TENSORS, Intent, Product

__all__ = ["Case", "Op"]

Array = npt.NDArray[Any]
Op = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with arguments, and the products that it must give.

    Attributes:
      op: function of two arrays, and of a key if `intent` has one.
      x, w: the arguments.
      g: cotangent of the result.
      intent: what the op is meant to do.
      form: which GEMM it is.
      products: y, dx and dw by the independent quantiser.
      seed: of random directions.
      given: canonical y, dx and dw to judge, instead of those that `op` gives.
      memory: what `shared` keeps.
    """

    op: Op
    x: Array
    w: Array
    g: Array
    intent: Intent
    form: Form
    products: tuple[Product, ...]
    seed: int = 0
    given: tuple[Array, ...] | None = None
    memory: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    def call(self, x: Any, w: Any) -> Any:
        """op(x, w), with the key if there is one."""
        return self.op(x, w) if self.intent.key is None else self.op(x, w, self.intent.key)

    def vjp(self, x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
        """y and the gradients of x and w."""
        y, pullback = jax.vjp(self.call, jnp.asarray(x), jnp.asarray(w))
        return (y, *pullback(jnp.asarray(g, y.dtype)))

    @functools.cached_property
    def observed(self) -> tuple[Array, ...]:
        """y, dx and dw of the op, canonical."""
        if self.given is not None:
            return self.given
        out = self.vjp(self.x, self.w, self.g)
        return tuple(
            self.form.canonical(p.which, y) for p, y in zip(self.products, out, strict=True)
        )

    def shared(self, name: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this case and those that differ in op or result."""
        if name not in self.memory:
            self.memory[name] = make()
        return self.memory[name]

    def with_op(self, op: Op) -> Case:
        """The same for another op."""
        return dataclasses.replace(self, op=op, given=None)

    def with_observed(self, *observed: Array) -> Case:
        """The same, judged by these canonical y, dx and dw."""
        return dataclasses.replace(self, given=observed)

    def rng(self) -> np.random.Generator:
        """Random numbers, the same for each check."""
        return np.random.default_rng(self.seed)

    def describe(self, product: Product, at: tuple[int, ...]) -> str:
        """The element `at` of a canonical tensor: its value, and its largest term with codes."""
        value = self.observed[TENSORS.index(product.tensor)][at]
        batch, (row, col) = at[:-2], at[-2:]
        a, b = (np.broadcast_to(x, (*self._batch(product), *x.shape[-2:]))
                for x in product.operands_used)  # fmt: skip
        if product.reduced:
            return f"worst element  {value!r}, exact {product.exact[at]:.9g}"
        k = int(np.argmax(np.abs(a[(*batch, row)] * b[(*batch, col)]))) if product.k else 0
        terms = []
        for name, x, r in (("a", product.a, row), ("b", product.b, col)):
            index = tuple(
                0 if n == 1 else i
                for n, i in zip(x.real.shape[:-2], batch, strict=True)
            )  # fmt: skip
            place = (*index, r, k)
            text = f"{name} = {float(x.real[place]):.6g}"
            if product.fp8:
                code = int(x.quantised[0].view(np.uint8)[place])
                text += f" ({x.format.name} code 0x{code:02x} · scale {x.scales[place]:.6g})"
            terms.append(text)
        return (
            f"worst element  {float(value):.9g}; product of quantised operands "
            f"{product.quantised[at]:.9g}, exact {product.exact[at]:.9g}; largest term, k = {k}: "
            f"{', '.join(terms)}"
        )

    def _batch(self, product: Product) -> tuple[int, ...]:
        return np.broadcast_shapes(product.a.real.shape[:-2], product.b.real.shape[:-2])
