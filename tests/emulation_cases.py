"""Emulated GEMMs to test with: what is asked for, operands of every kind, the library's answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import jax_fp8 as fp8
from jax_fp8 import _ffi
from jax_fp8.emulation import MACHINES, Machine
from rows import runnable_rows
from strategies import random_scales

__all__ = [
    "FINITE_KINDS",
    "FNUZ",
    "KINDS",
    "OCP",
    "Case",
    "Operands",
    "every_pair",
    "formats_of",
    "operand_codes",
    "random_accumulator",
]

Array = npt.NDArray[Any]

OCP = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
FNUZ = {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz}
_KERNEL_NAMES = {"e4m3": "e4m3fn", "e5m2": "e5m2", "fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}
_OUT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

#: Kinds of operands, all of them finite but the last two. "bytes" are codes each as likely as any
#: other; "special" has a NaN or an infinity now and then, so that long sums have few.
KINDS = ("finite", "subnormal", "wide", "sparse", "cancelling", "special", "bytes")
FINITE_KINDS = KINDS[:5]


def formats_of(machine: str) -> dict[str, Any]:
    """The formats of a machine's own instructions."""
    return FNUZ if MACHINES[machine].fnuz_operands else OCP


def operand_codes(
    rng: np.random.Generator, kind: str, fmt: Any, other: Any, m: int, n: int, k: int
) -> tuple[Array, Array]:
    """Codes (m, k) of dtype `fmt` and (n, k) of dtype `other`."""
    if kind == "cancelling":
        return _cancelling(rng, fmt, other, m, n, k)
    return _codes(rng, kind, fmt, (m, k)), _codes(rng, kind, other, (n, k))


def _codes(rng: np.random.Generator, kind: str, dtype: Any, shape: tuple[int, int]) -> Array:
    codes = np.arange(256, dtype=np.uint8).view(dtype)
    value = codes.astype(np.float32)
    is_finite = np.isfinite(value)
    size = np.where(is_finite, np.abs(value), 0)
    smallest_normal = float(ml_dtypes.finfo(dtype).smallest_normal)
    if kind == "bytes":
        return rng.choice(codes, shape)
    if kind == "subnormal":
        return rng.choice(codes[is_finite & (size < smallest_normal)], shape)
    if kind == "wide":
        largest = codes[size >= size.max() / 8]
        smallest = codes[is_finite & (size < smallest_normal * 4)]
        return np.where(
            rng.random(shape) < 0.5, rng.choice(largest, shape), rng.choice(smallest, shape)
        )
    out = rng.choice(codes[is_finite], shape)
    if kind == "sparse":
        return np.where(
            rng.random(shape) < 0.8, rng.choice(codes[is_finite & (size == 0)], shape), out
        )
    if kind == "special":
        rare = rng.random(shape) < 0.5 / max(shape[1], 1)
        return np.where(rare, rng.choice(codes[~is_finite], shape), out)
    assert kind == "finite", kind
    return out


def _cancelling(
    rng: np.random.Generator, fmt: Any, other: Any, m: int, n: int, k: int
) -> tuple[Array, Array]:
    """Products that come with their negative, in any order, and one that has none if k is odd."""
    lhs, rhs = _codes(rng, "finite", fmt, (m, k)), _codes(rng, "finite", other, (n, k))
    half, order = k // 2, rng.permutation(k)
    lhs[:, half : 2 * half] = lhs[:, :half]
    rhs[:, half : 2 * half] = -rhs[:, :half]
    return lhs[:, order], rhs[:, order]


def random_accumulator(
    rng: np.random.Generator, kind: str, dtype: Any, shape: tuple[int, ...]
) -> Array:
    """C of an instruction: "zero", "moderate" numbers, "finite" or all "bits"."""
    if kind == "zero":
        return np.zeros(shape, dtype)
    if kind == "moderate":
        exponents = 3 if dtype == np.float16 else 20
        exponent = rng.integers(-exponents, exponents, shape, endpoint=True)
        return np.ldexp(rng.standard_normal(shape) * 16, exponent).astype(dtype)
    unsigned = np.uint16 if dtype == np.float16 else np.uint32
    out = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True).view(dtype)
    return np.where(np.isfinite(out), out, np.ones((), dtype)) if kind == "finite" else out


@dataclasses.dataclass(frozen=True)
class Case:
    """A GEMM by an accumulation model. Tiles are (rows, k) of each operand; None is all of it.

    Machines that multiply by scales themselves get one for every 32 k whatever `tiles` say.
    """

    machine: str
    m: int = 5
    n: int = 3
    k: int = 256
    formats: tuple[str, str] | tuple[()] = ()
    tiles: tuple[tuple[int | None, int | None], tuple[int | None, int | None]] = ((None, None),) * 2
    interval: int | None = None  # a multiple of 32 where scales are inside
    split_k: int = 1
    layouts: tuple[str, str] = ("mk", "nk")
    out_dtype: str = "float32"

    @property
    def facts(self) -> Machine:
        return MACHINES[self.machine]

    @property
    def names(self) -> tuple[str, str]:
        """Names of the operands' formats; given none, those of the machine's first instruction."""
        first = next(iter(formats_of(self.machine)))
        return self.formats or (first, first)

    @property
    def dtypes(self) -> tuple[Any, Any]:
        return tuple((OCP | FNUZ)[name] for name in self.names)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The tiles with sizes."""
        out = []
        for rows, (tile_rows, tile_k) in zip((self.m, self.n), self.tiles, strict=True):
            k = max(self.k, 1) if tile_k is None else tile_k
            out.append((tile_rows or max(rows, 1), 32 if self.facts.scales_inside else k))
        return out

    def why_not(self, row: str) -> str:
        """Why a row refuses this, or ""."""
        lhs_tile, rhs_tile = (
            (min(rows, max(size, 1)), min(k, max(self.k, 1)))
            for (rows, k), size in zip(self.sizes, (self.m, self.n), strict=True)
        )
        reasons = _ffi.explain_gemm(
            self.m, self.n, self.k, *(_KERNEL_NAMES[name] for name in self.names),
            _OUT_NAMES[self.out_dtype], *self.layouts, lhs_tile, rhs_tile,
            self.machine, self.interval or 0, self.split_k, "", False,
        )  # fmt: skip
        # The FP32 model is the business of the native kernels.
        return dict(reasons).get(row, "" if self.machine == "fp32" else "no such row")

    def operands(self, seed: int = 0, kind: str = "finite") -> Operands:
        """Codes and scales of both sides, each as (rows, k)."""
        rng = np.random.default_rng(seed)
        values = operand_codes(rng, kind, *self.dtypes, self.m, self.n, self.k)
        scales = []
        for rows, tile in zip((self.m, self.n), self.sizes, strict=True):
            shape = (-(-rows // tile[0]), -(-self.k // tile[1]))
            if self.facts.scales_inside:
                scale = rng.integers(112, 143, shape, np.uint8).view(ml_dtypes.float8_e8m0fnu)
            else:
                scale = random_scales(rng, shape, (-8, 8))
            scales.append(scale)
        return Operands(*values, *scales)

    def run(self, row: str, operands: Operands, **options: Any) -> Array:
        """The library's answer on one row, through the public call that takes the formats."""
        lhs, rhs, lhs_scale, rhs_scale = (np.asarray(x) for x in operands)
        options = {
            "accumulation": self.machine,
            "promotion_interval": self.interval,
            "split_k": self.split_k,
            "preferred_element_type": np.dtype(self.out_dtype),
        } | options
        with fp8.force_kernel(row):
            if self.names[0] in FNUZ or self.names[1] in FNUZ:
                tiles = {"lhs_tile": self.sizes[0], "rhs_tile": self.sizes[1][::-1]}
                return np.asarray(
                    fp8.scaled_matmul(lhs, rhs.T, lhs_scale, rhs_scale.T, **tiles, **options)
                )
            sides = []
            for values, scale, tile, layout in zip(
                (lhs, rhs), (lhs_scale, rhs_scale), self.sizes, self.layouts, strict=True
            ):
                if layout[0] == "k":
                    values, scale, tile = values.T.copy(), scale.T.copy(), tile[::-1]
                sides.append(fp8.ScaledArray(values, scale, tile))
            contracting = tuple((layout.index("k"),) for layout in self.layouts)
            return np.asarray(fp8.scaled_dot_general(*sides, (contracting, ((), ())), **options))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Codes (m, k) and (n, k) with scales (m / tile, k / tile) and (n / tile, k / tile)."""

    lhs: Array
    rhs: Array
    lhs_scale: Array
    rhs_scale: Array

    def __iter__(self) -> Any:
        return iter((self.lhs, self.rhs, self.lhs_scale, self.rhs_scale))


def emulated_pairs() -> list[tuple[str, str]]:
    """(row, accumulation model) for every model that a runnable row of "emulate" takes."""
    return [
        (row, machine)
        for row in runnable_rows("emulate")
        for machine in MACHINES
        if not Case(machine).why_not(row)
    ]


every_pair = pytest.mark.parametrize(
    ("row", "machine"), emulated_pairs(), ids=["-".join(pair) for pair in emulated_pairs()]
)
