"""How fast whole GEMMs are emulated, beside the element-wise simulation of mmasim."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_fp8 import config, lowering
from jax_fp8.array import ScaledArray
from jax_fp8.emulation.machines import MACHINES, Machine
from jax_fp8.emulation.overflow import OverflowWarning
from jax_fp8.formats import E4M3FN, E8M0
from jax_fp8.gemm import MX_BLOCK
from jax_fp8.scaled import scaled_dot_general

__all__ = ["Speed", "cpus", "mmasim_seconds", "only_one_cpu", "speeds"]

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
    rng = np.random.default_rng(seed)
    for name in machines:
        lhs, rhs = _operands(MACHINES[name], shape, rng)
        for kernel in kernels or _first_kernel(name):
            if _refuses(kernel, name):
                continue
            with config.force_kernel(kernel):
                call = _compiled(lhs, rhs, name)
            yield Speed(name, kernel, shape, _median_seconds(call, repeats))


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
    return _median_seconds(lambda: wgmma(a, b, torch.zeros((m, n))), repeats)


def cpus() -> set[int]:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def only_one_cpu() -> None:
    """Keeps this process on one CPU; call it before JAX starts its backend and thread pool."""
    os.sched_setaffinity(0, {min(cpus())})


def _first_kernel(machine: str) -> list[str]:
    rows = [row.name for row in lowering.kernel_table() if row.operation == "emulate"]
    return [next(row for row in rows if not _refuses(row, machine))]


def _refuses(kernel: str, machine: str) -> str:
    return lowering.emulation_refusals(machine)[kernel]


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


def _compiled(lhs: ScaledArray, rhs: ScaledArray, machine: str) -> Callable[[], Any]:
    def gemm(lhs: ScaledArray, rhs: ScaledArray) -> jax.Array:
        numbers = (((1,), (0,)), ((), ()))
        return scaled_dot_general(lhs, rhs, numbers, accumulation=machine)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverflowWarning)  # the results don't matter
        compiled = jax.jit(gemm).lower(lhs, rhs).compile()
    return lambda: compiled(lhs, rhs).block_until_ready()


def _median_seconds(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
