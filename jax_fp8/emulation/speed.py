"""How fast whole GEMMs are emulated, beside the element-wise simulation of mmasim."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_fp8 import config, lowering
from jax_fp8.array import ScaledArray
from jax_fp8.bench.timing import compiled, median_seconds
from jax_fp8.emulation.machines import MACHINES, Machine
from jax_fp8.emulation.overflow import OverflowWarning
from jax_fp8.formats import E4M3FN, E8M0
from jax_fp8.gemm import MX_BLOCK
from jax_fp8.scaled import scaled_dot_general

__all__ = ["EmulatedGemm", "Speed", "emulated_gemm", "mmasim_seconds", "speeds"]

#: Tile on which mmasim is timed: one wgmma instruction, four steps deep.
MMASIM_TILE = (64, 128, 128)


@dataclasses.dataclass(frozen=True)
class Speed:
    """One timing.

    Attributes:
      machine: accumulation model.
      kernel: row that ran.
      shape: (m, n, k).
      seconds: median wall time of a call, packing included.
      gmacs: 10^9 multiplications and additions a second, from the median.
    """

    machine: str
    kernel: str
    shape: tuple[int, int, int]
    seconds: float

    @property
    def gmacs(self) -> float:
        m, n, k = self.shape
        return m * n * k / self.seconds / 1e9


@dataclasses.dataclass(frozen=True)
class EmulatedGemm:
    """A whole GEMM that is emulated.

    Attributes:
      kernel: row that runs.
      lhs: (m, k) operand.
      rhs: (k, n) operand.
      call: compiled; returns the (m, n) result when it is there.
    """

    kernel: str
    lhs: ScaledArray
    rhs: ScaledArray
    call: Callable[[], jax.Array]


def emulated_gemm(
    machine: str, shape: tuple[int, int, int], *, kernel: str | None = None, seed: int = 0
) -> EmulatedGemm:
    """A GEMM of (m, n, k) on random normal E4M3 operands, weights (k, n).

    Args:
      machine: name of one of `MACHINES`.
      shape: (m, n, k).
      kernel: name of an emulation row; None is the one that takes the call.
      seed: of the operands.

    >>> emulated_gemm("ada_mma", (8, 4, 32)).call().shape
    (8, 4)
    """
    lhs, rhs = _operands(MACHINES[machine], shape, np.random.default_rng(seed))
    if kernel is None:
        refusals = lowering.emulation_refusals(machine)
        kernel = next(row for row, why_not in refusals.items() if not why_not)
    with config.force_kernel(kernel):
        return EmulatedGemm(kernel, lhs, rhs, _compiled(lhs, rhs, machine))


def speeds(
    machines: Sequence[str],
    shape: tuple[int, int, int],
    *,
    kernels: Sequence[str] | None = None,
    repeats: int = 5,
    seed: int = 0,
) -> Iterator[Speed]:
    """Times whole GEMMs on random normal E4M3 operands, weights (k, n).

    Args:
      machines: names of `MACHINES`.
      shape: (m, n, k).
      kernels: names of emulation rows; None is the one that takes the call.
      repeats: timed calls, after one that is not.
      seed: of the operands.

    Yields:
      Speed of each machine on each kernel that emulates it.

    >>> [speed.machine for speed in speeds(["ada_mma"], (8, 8, 32), repeats=1)]
    ['ada_mma']
    """
    for name in machines:
        refusals = lowering.emulation_refusals(name)
        runnable = [row for row, why_not in refusals.items() if not why_not]
        for kernel in runnable[:1] if kernels is None else kernels:
            if kernel not in runnable:
                continue
            gemm = emulated_gemm(name, shape, kernel=kernel, seed=seed)
            yield Speed(name, gemm.kernel, shape, median_seconds(gemm.call, repeats))


def mmasim_seconds(repeats: int = 3, seed: int = 0) -> float | None:
    """Median time of mmasim for `MMASIM_TILE` on Hopper's wgmma, on one thread of torch.

    Returns:
      Seconds, or None if mmasim is not installed.
    """
    if importlib.util.find_spec("mmasim") is None:
        return None
    torch = importlib.import_module("torch")
    simulator = importlib.import_module("mmasim.nv_ptx")
    torch.set_num_threads(1)
    m, n, k = MMASIM_TILE
    rng = np.random.default_rng(seed)
    a, b = (torch.tensor(_codes(rng, size).view(np.uint8)) for size in ((m, k), (k, n)))
    a, b = (x.view(torch.float8_e4m3fn) for x in (a, b))
    wgmma = simulator.WGMMA("Hopper", f"m{m}n{n}k32.f32.e4m3.e4m3")
    return median_seconds(lambda: wgmma(a, b, torch.zeros((m, n))), repeats)


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    values = np.clip(rng.standard_normal(shape) * 100, -E4M3FN.max, E4M3FN.max)
    return values.astype(E4M3FN.dtype)


def _operands(
    machine: Machine, shape: tuple[int, int, int], rng: np.random.Generator
) -> tuple[ScaledArray, ScaledArray]:
    m, n, k = shape
    lhs, rhs = jax.numpy.asarray(_codes(rng, (m, k))), jax.numpy.asarray(_codes(rng, (k, n)))
    if machine.scales_inside:
        blocks = -(-k // MX_BLOCK)
        ones = [np.full(size, 127, np.uint8).view(E8M0) for size in ((m, blocks), (blocks, n))]
        tile = min(MX_BLOCK, k)
        return (
            ScaledArray(lhs, jax.numpy.asarray(ones[0]), (1, tile)),
            ScaledArray(rhs, jax.numpy.asarray(ones[1]), (tile, 1)),
        )
    one = jax.numpy.ones((1, 1))
    return ScaledArray(lhs, one, (m, k)), ScaledArray(rhs, one, (k, n))


def _compiled(lhs: ScaledArray, rhs: ScaledArray, machine: str) -> Callable[[], jax.Array]:
    def gemm(lhs: ScaledArray, rhs: ScaledArray) -> jax.Array:
        numbers = (((1,), (0,)), ((), ()))
        return scaled_dot_general(lhs, rhs, numbers, accumulation=machine)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverflowWarning)  # the results don't matter
        return functools.partial(compiled(gemm, lhs, rhs), lhs, rhs)
