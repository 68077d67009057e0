"""The accumulators of `emulation.MACHINES` in fractions, from their published descriptions.

One product at a time, exactly, and rounded where the description says so. It shares nothing with
the kernels but the names of the machines. Sources: MMA-Sim, arXiv 2511.10909, and the docstring of
`Machine`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from emulation_cases import Case, Operands
from jax_fp8.emulation import MACHINES, Machine
from jax_fp8.testing import oracle

__all__ = ["gemm_by_fractions", "gemm_by_pieces", "instruction_by_fractions"]

Array = npt.NDArray[Any]
#: Lowest exponents of normal numbers.
MIN_EXPONENT = {
    np.dtype(ml_dtypes.float8_e4m3fn): -6,
    np.dtype(ml_dtypes.float8_e5m2): -14,
    np.dtype(ml_dtypes.float8_e4m3fnuz): -7,
    np.dtype(ml_dtypes.float8_e5m2fnuz): -15,
}
FP16_MIN_EXPONENT, FP32_MIN_EXPONENT = -14, -126
#: Of cdna3_mfma: fraction bits of the second alignment.
GROUPED_WIDE_BITS = 31


@dataclasses.dataclass(frozen=True)
class Type:
    """A binary floating-point type and how a sum is rounded to it."""

    precision: int  # significant bits
    min_exponent: int  # of normal numbers
    max_exponent: int
    to_nearest: bool

    def round(self, x: Fraction) -> Fraction | float:
        """x rounded once, to an infinity where it is too large."""
        if x == 0:
            return x
        unit = Fraction(2) ** (max(exponent_of(x), self.min_exponent) - self.precision + 1)
        rounded = (round(x / unit) if self.to_nearest else math.trunc(x / unit)) * unit
        if rounded and exponent_of(rounded) > self.max_exponent:
            return math.copysign(math.inf, rounded)
        return rounded


FP32 = Type(24, -126, 127, True)
TYPES = {
    "rz_e8m13": Type(14, -126, 127, False),
    "rz_fp32": Type(24, -126, 127, False),
    "rne_fp32": FP32,
    "rne_fp16": Type(11, -14, 15, True),
    "rne_bf16": Type(8, -126, 127, True),
}


def exponent_of(x: Fraction) -> int:
    """floor(log2 |x|) of what is not 0."""
    n, d = abs(x.numerator), x.denominator
    guess = n.bit_length() - d.bit_length()
    return guess if n << max(-guess, 0) >= d << max(guess, 0) else guess - 1


@dataclasses.dataclass(frozen=True)
class Term:
    """A number and the exponent that it is aligned by."""

    value: Fraction
    exponent: int

    def cut(self, exponent: int, bits: int, to_integer: Any = math.trunc) -> Fraction:
        """Its multiple of 2^(exponent - bits), cut toward zero, or by another function."""
        unit = Fraction(2) ** (exponent - bits)
        return to_integer(self.value / unit) * unit


def aligned(x: Fraction, min_exponent: int, zero_exponent: int) -> Term:
    return Term(x, max(exponent_of(x), min_exponent) if x else zero_exponent)


# --- One step -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chain:
    """One output of a machine: codes of a and b along k, of these dtypes."""

    machine: Machine
    a: Array
    b: Array

    def sum(self, c: float, scale_exponents: Sequence[int] = ()) -> float:
        """c and all products, in steps; `scale_exponents` has one for each step, or is empty."""
        machine, size = self.machine, len(self.a)
        if machine.summation in ("pairwise", "exact"):
            return self.special(0, size, c) or self._whole(0, size)
        for i, begin in enumerate(range(0, size, machine.step)):
            end = min(begin + machine.step, size)
            scale = scale_exponents[i] if scale_exponents else 0
            c = self.special(begin, end, c) or self._step(begin, end, Fraction(c), scale)
        return c

    def special(self, begin: int, end: int, c: float) -> float:
        """The sum by IEEE's rules if a term is NaN or infinite, else 0."""
        a, b = (x[begin:end].astype(np.float64).tolist() for x in (self.a, self.b))
        terms = [x * y for x, y in zip(a, b, strict=True)] + [c]
        special = [x for x in terms if not math.isfinite(x)]
        return sum(special) if special else 0.0

    def _whole(self, begin: int, end: int) -> float:
        products = [self._product(k).value for k in range(begin, end)]
        if self.machine.summation == "exact":
            return float(FP32.round(sum(products, Fraction(0))))
        return float(_pairwise(products))

    def _step(self, begin: int, end: int, c: Fraction, scale: int) -> float:
        machine = self.machine
        if machine.summation == "aligned":
            return self._aligned_step(begin, end, c, scale)
        if machine.summation == "grouped":
            return self._grouped_step(begin, end, c)
        chunk = Fraction(0)
        if machine.summation == "sequential":
            (k,) = range(begin, end)
            chunk = self._product(k).value
        else:
            for k in range(begin, end):
                chunk = FP32.round(chunk + self._product(k).value)  # cannot overflow
        return float(TYPES[machine.rounding].round(c + chunk))

    def _product(self, k: int, scale: int = 0) -> Term:
        """Significands are multiplied and not normalised, so exponents add up."""
        value, exponent = Fraction(2) ** scale, scale
        for x in (self.a[k], self.b[k]):
            low = FP16_MIN_EXPONENT if self.machine.fp16_operands else MIN_EXPONENT[x.dtype]
            term = aligned(Fraction(float(x)), low, 0)
            value, exponent = value * term.value, exponent + term.exponent
        return Term(value, exponent if value else self.machine.zero_exponent)

    def _aligned_step(self, begin: int, end: int, c: Fraction, scale: int) -> float:
        machine = self.machine
        zero = machine.zero_exponent
        is_fp16 = machine.rounding == "rne_fp16"
        terms = [self._product(k, scale) for k in range(begin, end)]
        terms += [Term(Fraction(0), zero)] * (machine.step - len(terms))  # a short step has zeros
        terms.append(aligned(c, FP16_MIN_EXPONENT if is_fp16 else FP32_MIN_EXPONENT, zero))
        largest = max(term.exponent for term in terms)
        total = sum((term.cut(largest, machine.fraction_bits) for term in terms), Fraction(0))
        return float(TYPES[machine.rounding].round(total)) + 0.0

    def _grouped_step(self, begin: int, end: int, c: Fraction) -> float:
        """Two alignments: within even and odd k toward zero, then of both and c downward."""
        bits, groups = self.machine.fraction_bits, []
        for parity in (0, 1):
            terms = [self._product(k) for k in range(begin + parity, end, 2)]
            largest = max([self.machine.zero_exponent, *(term.exponent for term in terms)])
            total = sum((term.cut(largest, bits) for term in terms), Fraction(0))
            groups.append(Term(total, largest))
        dot_exponent = max(group.exponent for group in groups)
        dot = sum((g.cut(dot_exponent, bits, math.floor) for g in groups), Fraction(0))
        old = aligned(c, FP32_MIN_EXPONENT, FP32_MIN_EXPONENT)
        largest = max(dot_exponent, old.exponent)
        total = Term(dot, dot_exponent).cut(largest, GROUPED_WIDE_BITS + 1, math.floor)
        if old.exponent >= largest - bits - 1:
            total += old.cut(largest, bits, math.floor)
        binade = max(exponent_of(total), FP32_MIN_EXPONENT) if total else 0
        return float(FP32.round(Term(total, binade).cut(binade, GROUPED_WIDE_BITS, math.floor)))


def _pairwise(products: list[Fraction]) -> Fraction:
    """A binary tree whose left half is the largest power of two that leaves something over."""
    if len(products) <= 1:
        return products[0] if products else Fraction(0)
    left = 1 << (len(products) - 1).bit_length() - 1
    total = FP32.round(_pairwise(products[:left]) + _pairwise(products[left:]))
    assert isinstance(total, Fraction)
    return total


# --- Instructions and GEMMs -----------------------------------------------------------------------


def instruction_by_fractions(machine: str, a: Array, b: Array, c: Array) -> Array:
    """d = a · b + c for (m, k), (k, n) and (m, n), as float32; NaN is any NaN."""
    facts = MACHINES[machine]
    d = np.zeros(c.shape, np.float32)
    for i, j in np.ndindex(*c.shape):
        d[i, j] = Chain(facts, a[i], b[:, j]).sum(float(c[i, j]))
    return d


def gemm_by_fractions(case: Case, operands: Operands) -> Array:
    """A whole GEMM; float32 (m, n) before it is rounded to another type."""

    def sums(begin: int, end: int) -> Array:
        return _sums(case, operands, begin, end)

    return gemm_by_pieces(case, operands, sums)


def gemm_by_pieces(case: Case, operands: Operands, sums: Callable[[int, int], Array]) -> Array:
    """A whole GEMM as line 5 of the numbers contract cuts, scales and adds it.

    Args:
      case: what is asked for.
      operands: codes and scales.
      sums: float32 (m, n) sums of the products of one piece of k, [begin, end).
    """
    facts, k = case.facts, case.k
    lhs_tile, rhs_tile = case.sizes
    scales = [
        oracle.expand_scale_np(scale.astype(np.float32), values.shape, tile)
        for values, scale, tile in (
            (operands.lhs, operands.lhs_scale, lhs_tile),
            (operands.rhs, operands.rhs_scale, rhs_tile),
        )
    ]
    scales_vary = not facts.scales_inside and min(lhs_tile[1], rhs_tile[1]) < k
    total = np.zeros((case.m, case.n), np.float32)
    with np.errstate(all="ignore"):
        for part, pieces in enumerate(_parts(case)):
            acc = np.zeros_like(total)
            for begin, end in pieces:
                partial = sums(begin, end)
                scale = scales[0][:, None, begin] * scales[1][None, :, begin]
                scaled = oracle.fma_np(partial, scale, acc) if scales_vary else acc + partial
                acc = np.where(partial == 0, acc, scaled)
            total = acc if part == 0 else total + acc
        if not scales_vary and not facts.scales_inside and k:
            scale = scales[0][:, None, 0] * scales[1][None, :, 0]
            total = np.where(total == 0, total, total * scale)
    return total


def _sums(case: Case, operands: Operands, begin: int, end: int) -> npt.NDArray[np.float32]:
    """The sum of one piece of k for every output."""
    out = np.zeros((case.m, case.n), np.float32)
    blocks = range(begin // 32, math.ceil(end / 32))
    for i, j in np.ndindex(*out.shape):
        exponents: list[int] = []
        if case.facts.scales_inside:
            rows = (case.sizes[0][0], case.sizes[1][0])
            product = [
                float(operands.lhs_scale[i // rows[0], block])
                * float(operands.rhs_scale[j // rows[1], block])
                for block in blocks
            ]
            if any(math.isnan(scale) for scale in product):
                out[i, j] = math.nan
                continue
            exponents = [exponent_of(Fraction(scale)) for scale in product]
        chain = Chain(case.facts, operands.lhs[i, begin:end], operands.rhs[j, begin:end])
        out[i, j] = chain.sum(0.0, exponents)
    return out


def _parts(case: Case) -> list[list[tuple[int, int]]]:
    """The pieces of k of every part: [begin, end) between the places where a chain starts anew."""
    k = case.k
    if k == 0:
        return []
    units = math.ceil(k / 128)
    part = math.ceil(units / case.split_k) * 128
    tile_edges: set[int] = set()
    if not case.facts.scales_inside:
        for _, tile_k in case.sizes:
            tile_edges.update(range(0, k, tile_k))
    parts = []
    for part_begin in range(0, k, part):
        part_end = min(part_begin + part, k)
        edges = sorted(
            {part_begin, part_end, *(e for e in tile_edges if part_begin < e < part_end)}
        )
        pieces: list[tuple[int, int]] = []
        for begin, end in itertools.pairwise(edges):
            interval = k if case.facts.ignores_interval else case.interval or k
            starts = range(begin, end, interval)
            pieces += [(start, min(start + interval, end)) for start in starts]
        parts.append(pieces)
    return parts
