"""GEMM contenders: our kernels on quantised operands, and XLA's own dots."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import config, dispatch
from jax_fp8.array import ScaledArray
from jax_fp8.bench import peers
from jax_fp8.bench.cases import Contender, Options
from jax_fp8.bench.operands import LAYOUTS, PREPARED, Inputs, Rotation, Sample, Weights
from jax_fp8.bench.peaks import PEAK_OF_ROW
from jax_fp8.bench.timing import Timed, compiled, cube_rate
from jax_fp8.prepared import PreparedArray
from jax_fp8.recipes import BY_NAME
from jax_fp8.scaled import scaled_dot_general

__all__ = ["TOLERANCES", "Gemm", "forced", "gemm_contenders", "ours", "xla"]

#: Largest relative error of a result against float64 of the same operands, by the dtype of its
#: sums or itself: a few times what long sums reach in it, far below what another product has.
TOLERANCES: Final = {"f32": 2e-5, "bf16": 2e-2, "f16": 5e-3}


class Gemm:
    """One product, ready to be multiplied by anyone.

    Args:
      m: rows.
      weights: its (n, k) factor.
      options: of the command.
    """

    def __init__(self, m: int, weights: Weights, options: Options) -> None:
        self.weights, self.options = weights, options
        self.m, (self.n, self.k) = m, weights.array.shape
        self.inputs = Inputs(m, self.k, options.seed)
        self.sample = Sample(m, self.n)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def contender(
        self,
        name: str,
        group: str,
        call: Callable[[], Any],
        *,
        lhs: Any,
        rhs: Any,
        itemsize: int,
        tolerance: float,
        scale_bytes: int = 0,
        **more: Any,
    ) -> Contender:
        """A contender whose result is checked on `lhs` (m, k) and `rhs` (n, k)."""
        operands = (self.m + self.n) * self.k * itemsize + scale_bytes
        return Contender(
            name=name,
            group=group,
            timed=Timed(call, before=getattr(call, "touch", None)),
            check=self.sample.check(call, lhs, rhs, tolerance),
            flops=self.flops,
            counted_bytes=self.n * self.k * itemsize,
            moved_bytes=operands + 4 * self.m * self.n,
            memory={"operands": operands},
            **more,
        )


@contextlib.contextmanager
def forced(options: Options) -> Iterator[None]:
    """The context of `--kernel` and `--any-order`."""
    with contextlib.ExitStack() as stack:
        if options.kernel:
            stack.enter_context(config.force_kernel(options.kernel))
        if options.any_order:
            stack.enter_context(config.deterministic(False))
        yield


def _dims(layout: str) -> Any:
    return (((1,), (LAYOUTS.get(layout, 0),)), ((), ()))


def ours(
    gemm: Gemm,
    recipes: Iterable[str],
    peak: str | None = None,
    layouts: Iterable[str] = tuple(LAYOUTS),
) -> list[Contender]:
    """Our kernel on quantised operands, for each recipe and layout of the weights.

    Args:
      gemm: the product.
      recipes: names.
      peak: that speed is a share of; None is the multiply instruction of the row that runs.
      layouts: of the weights.
    """
    found = []
    for recipe, layout in itertools.product(recipes, layouts):
        lhs = gemm.inputs.scaled(recipe)
        weights: Sequence[ScaledArray | PreparedArray] = (
            gemm.weights.prepared(recipe)
            if layout == PREPARED
            else gemm.weights.scaled(recipe, layout)
        )

        def product(
            lhs: ScaledArray, rhs: ScaledArray | PreparedArray, layout: str = layout
        ) -> jax.Array:
            return scaled_dot_general(lhs, rhs, _dims(layout))

        with forced(gemm.options):
            call = Rotation(
                compiled(product, lhs, weights[0]),
                lhs,
                weights,
                gemm.weights.turns(recipe, layout),
                [one.values for one in weights],
            )
            kernel = _kernel(gemm, recipe, layout)
        found.append(
            gemm.contender(
                f"{recipe} {layout}",
                recipe,
                call,
                lhs=lhs,
                rhs=gemm.weights.scaled(recipe, "(N,K)")[0],
                itemsize=1,
                tolerance=TOLERANCES["f32"],
                scale_bytes=4 * (lhs.scale.size + weights[0].scale.size),
                kind="ours",
                kernel=kernel,
                peak=PEAK_OF_ROW.get(kernel, "") if peak is None else peak,
            )
        )
    return found


def _kernel(gemm: Gemm, recipe: str, layout: str) -> str:
    shape = (gemm.n, gemm.k) if layout == "(N,K)" else (gemm.k, gemm.n)
    lhs, rhs = (jax.ShapeDtypeStruct(s, np.float32) for s in ((gemm.m, gemm.k), shape))
    found = dispatch.explain(lhs, rhs, _dims(layout), recipe=BY_NAME[recipe], platform="cpu")
    return found.gemms[0].kernel


def xla(gemm: Gemm, dtypes: Sequence[str], cut: list[str], peak: str = "") -> list[Contender]:
    """XLA's dots with float32 results, both layouts; sentences on what is left out go to `cut`.

    "f8" multiplies the E4M3 codes of the recipe "tensor", without scales.
    """
    found = []
    for dtype, layout in itertools.product(dtypes, LAYOUTS):
        if dtype == "f16" and _f16_seconds(gemm.flops) > gemm.options.budget_seconds / 2:
            sentence = f"XLA f16 at {gemm.m} x {gemm.n} x {gemm.k}: too slow for the budget"
            cut.extend([sentence] if sentence not in cut else [])
            continue
        lhs: jax.Array
        turns = gemm.weights.turns("tensor" if dtype == "f8" else dtype, layout)
        if dtype == "f8":
            lhs, weights, rhs = (
                gemm.inputs.scaled("tensor").values,
                [q.values for q in gemm.weights.scaled("tensor", layout)],
                gemm.weights.scaled("tensor", "(N,K)")[0].values,
            )
        else:
            lhs, weights = gemm.inputs.real(dtype), gemm.weights.real(dtype, layout)
            rhs = gemm.weights.real(dtype, "(N,K)")[0]
        call = compiled(functools.partial(_dot, layout), lhs, weights[0])
        found.append(
            gemm.contender(
                f"XLA {dtype} {layout}",
                f"XLA {dtype}",
                Rotation(call, lhs, weights, turns, weights),
                lhs=lhs,
                rhs=rhs,
                itemsize=lhs.dtype.itemsize,
                tolerance=TOLERANCES.get(dtype, TOLERANCES["f32"]),
                kind="peer",
                peak=peak,
            )
        )
    return found


def _dot(layout: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.lax.dot_general(lhs, rhs, _dims(layout), preferred_element_type=jnp.float32)


@functools.cache
def _f16_rate() -> float:
    """FLOP/s of small float16 dots: some CPUs emulate float16 element by element."""

    def call_of(size: int) -> Callable[[], Any]:
        x = jnp.ones((size, size), np.float16)
        return functools.partial(compiled(functools.partial(_dot, "(N,K)"), x, x), x, x)

    return cube_rate(call_of)


def _f16_seconds(flops: float) -> float:
    return flops / _f16_rate()


def gemm_contenders(
    gemm: Gemm,
    recipes: Sequence[str],
    cut: list[str],
    *,
    dtypes: Sequence[str] = ("f32", "bf16", "f16", "f8"),
    peak: str | None = None,
    tiled: bool = True,
    layouts: Iterable[str] = tuple(LAYOUTS),
) -> list[Contender]:
    """Everyone who can compute the product, ours first.

    Args:
      gemm: the product.
      recipes: of ours, unless the command line names others.
      cut: takes sentences on who is left out.
      dtypes: of XLA's dots.
      peak: that all speeds are a share of; None is the multiply instruction of our row.
      tiled: whether qwix's tiled dot is one of them.
      layouts: of our weights.
    """
    chosen = gemm.options.peers
    found = ours(gemm, gemm.options.recipes or recipes, peak, layouts)
    if "xla" in chosen:
        found += xla(gemm, dtypes, cut, peak or "")
    if "torch" in chosen and peers.installed("torch"):
        found += peers.torch_contenders(gemm, peak or "", cut)
    if tiled and "qwix" in chosen and peers.installed("qwix"):
        found += peers.qwix_contenders(gemm, cut)
    return found
