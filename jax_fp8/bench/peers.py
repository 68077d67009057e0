"""Peers that are packages of their own: torch's GEMMs on the CPU, and qwix's tiled FP8 dot.

They load when they are first used, after the process is pinned to its CPUs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.array import ScaledArray
from jax_fp8.bench.cases import Contender
from jax_fp8.bench.operands import LAYOUTS, Inputs, Rotation, Weights
from jax_fp8.bench.timing import compiled, cube_rate

if TYPE_CHECKING:
    from jax_fp8.bench.contenders import Gemm

__all__ = ["INSTALL", "installed", "missing", "qwix_contenders", "torch_contenders", "versions"]

#: Peers that are not a part of JAX, and what installs them.
INSTALL: Final = {"torch": "pip install torch", "qwix": "pip install qwix"}
#: FLOPs of the largest product on which qwix's tiled dot is timed: it takes seconds at 1024³.
QWIX_MAX_FLOPS: Final = 2.0 * 1024**3
#: What qwix scales: 1 x 128 tiles of the activations, 128 x 128 blocks of the weights.
QWIX_TILE: Final = 128


@functools.cache
def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def missing(families: Sequence[str]) -> list[dict[str, str]]:
    """Of these families of peers, those that are not installed, and the remedy."""
    return [
        {"peer": name, "install": INSTALL[name]}
        for name in families
        if name in INSTALL and not installed(name)
    ]


def versions(families: Sequence[str]) -> dict[str, str]:
    """Version of each of these packages that is installed."""
    return {
        name: importlib.metadata.version(name)
        for name in families
        if name in INSTALL and installed(name)
    }


def torch_contenders(gemm: Gemm, peak: str, cut: list[str]) -> list[Contender]:
    """`torch.mm` in float32 and bfloat16, and `torch._scaled_mm` with tensor and row scales.

    Both layouts of the weights. `_scaled_mm` refuses block scales on a CPU.
    """
    torch = importlib.import_module("torch")
    torch.set_num_threads(gemm.options.threads)
    found = []
    for dtype, layout in itertools.product(("f32", "bf16"), LAYOUTS):
        lhs = gemm.inputs.real(dtype)
        weights = [_tensor(torch, w) for w in gemm.weights.real(dtype, layout)]
        if layout == "(N,K)":
            weights = [w.t() for w in weights]
        turns = gemm.weights.turns(dtype, layout)
        memory = gemm.weights.real(dtype, layout)
        call = _rotating(torch.mm, _tensor(torch, lhs), weights, turns, memory)
        found.append(
            gemm.contender(
                f"torch {dtype} {layout}",
                f"torch {dtype}",
                call,
                lhs=lhs,
                rhs=gemm.weights.real(dtype, "(N,K)")[0],
                itemsize=lhs.dtype.itemsize,
                # torch.mm rounds its result to the dtype of the operands.
                tolerance=2e-2 if dtype == "bf16" else 2e-5,
                kind="peer",
                peak=peak,
            )
        )
    if hasattr(torch, "_scaled_mm") and hasattr(torch, "float8_e4m3fn"):
        found += _scaled_mm_contenders(gemm, torch, peak, cut)
    return found


def _scaled_mm_contenders(gemm: Gemm, torch: Any, peak: str, cut: list[str]) -> list[Contender]:
    found = []
    for recipe, layout in itertools.product(("tensor", "row"), LAYOUTS):
        rate = _scaled_mm_rate(recipe, layout)
        seconds = gemm.flops / rate if rate else math.inf
        if seconds > gemm.options.budget_seconds / 2:
            why = f"too slow for the budget, {rate / 1e9:.2g} GFLOP/s" if rate else "refused"
            sentence = f"torch _scaled_mm {recipe} {layout}: {why}"
            cut.extend([sentence] if sentence not in cut else [])
            continue
        lhs = gemm.inputs.scaled(recipe)
        own = gemm.weights.scaled(recipe, layout)
        turns = gemm.weights.turns(recipe, layout)
        call = _rotating_scaled_mm(torch, recipe, layout, lhs, own, turns)
        found.append(
            gemm.contender(
                f"torch _scaled_mm {recipe} {layout}",
                "torch _scaled_mm",
                call,
                lhs=lhs,
                rhs=gemm.weights.scaled(recipe, "(N,K)")[0],
                itemsize=1,
                tolerance=2e-5,
                kind="peer",
                peak=peak,
            )
        )
    return found


def _rotating_scaled_mm(
    torch: Any,
    recipe: str,
    layout: str,
    lhs: ScaledArray,
    rhs: Sequence[ScaledArray],
    turns: Iterator[int],
) -> Rotation:
    weights = [_tensor(torch, q.values) for q in rhs]
    if layout == "(N,K)":
        weights = [w.t() for w in weights]
    m, n = lhs.shape[0], weights[0].shape[1]
    scale_shapes = ((), ()) if recipe == "tensor" else ((m, 1), (1, n))
    scales = [
        _tensor(torch, q.scale).reshape(shape)
        for q, shape in zip((lhs, rhs[0]), scale_shapes, strict=True)
    ]
    multiply = functools.partial(
        torch._scaled_mm, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32
    )
    memory = [q.values for q in rhs]
    return _rotating(multiply, _tensor(torch, lhs.values), weights, turns, memory)


@functools.cache
def _scaled_mm_rate(recipe: str, layout: str) -> float:
    """FLOP/s of small products, 0 where torch refuses them.

    Some pairs of scales and layout run in a reference loop that is thousands of times slower.
    """
    torch = importlib.import_module("torch")

    def call_of(size: int) -> Callable[[], Any]:
        lhs, weights = Inputs(size, size, 0), Weights(size, size, 0)
        rhs, turns = weights.scaled(recipe, layout), weights.turns(recipe, layout)
        return _rotating_scaled_mm(torch, recipe, layout, lhs.scaled(recipe), rhs, turns)

    try:
        return cube_rate(call_of)
    except (RuntimeError, ValueError, NotImplementedError):
        return 0.0


def _tensor(torch: Any, x: jax.Array) -> Any:
    """The memory of a JAX array as a tensor."""
    array = np.asarray(x)
    codes = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}.get(array.dtype.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is read only, and nobody writes to it
        tensor = torch.from_numpy(array if codes is None else array.view(codes))
    return tensor if codes is None else tensor.view(getattr(torch, array.dtype.name))


def _rotating(
    multiply: Any,
    lhs: Any,
    weights: Sequence[Any],
    turns: Iterator[int],
    memory: Sequence[jax.Array],
) -> Rotation:
    """A call of torch whose results NumPy can read."""

    def call(lhs: Any, weights: Any) -> _Result:
        return _Result(multiply(lhs, weights))

    return Rotation(call, lhs, weights, turns, memory)


class _Result:
    """A tensor that becomes a float32 array where one is asked for, and not while it is timed."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._tensor.float().numpy(), dtype)


def qwix_contenders(gemm: Gemm, cut: list[str]) -> list[Contender]:
    """qwix's dot of FP8 operands with 1x128 and 128x128 scales; it is as fast on weights (N,K)."""
    where = f"qwix tiled at {gemm.m} x {gemm.n} x {gemm.k}"
    if gemm.flops > QWIX_MAX_FLOPS:
        cut.append(f"{where}: it would take seconds a call; the largest product is 1024³")
        return []
    if gemm.n % QWIX_TILE or gemm.k % QWIX_TILE:
        cut.append(f"{where}: its tiles of {QWIX_TILE} must divide N and K")
        return []
    qwix = importlib.import_module("qwix")
    quantize = functools.partial(qwix.quantize, qtype="float8_e4m3fn")
    lhs = quantize(gemm.inputs.real("f32"), channelwise_axes=[0], tiled_axes={1: QWIX_TILE})
    tiles = dict.fromkeys((0, 1), QWIX_TILE)
    reference = [
        np.asarray(qwix.dequantize(q))
        for q in (lhs, quantize(gemm.weights.real("f32", "(N,K)")[0], tiled_axes=tiles))
    ]
    rhs = quantize(gemm.weights.real("f32", "(K,N)")[0], tiled_axes=tiles)

    def product(lhs: Any, rhs: Any) -> Any:
        dims = (((1,), (0,)), ((), ()))
        return qwix.dot_general(lhs, rhs, dims, preferred_element_type=jnp.float32)

    return [
        gemm.contender(
            "qwix tiled (K,N)",
            "qwix tiled",
            functools.partial(compiled(product, lhs, rhs), lhs, rhs),
            lhs=reference[0],
            rhs=reference[1],
            itemsize=1,
            tolerance=2e-5,
            kind="peer",
        )
    ]
