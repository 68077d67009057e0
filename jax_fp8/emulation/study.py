"""The error of an accumulator against K: operands that are FP8 already, and an exact reference.

So quantisation, which costs some 4 %, is left out, and what remains is how a machine adds up. The
reference is a float64 product of the codes in NumPy: exact for E4M3 · E4M3 up to K = 2^17, and
within 1e-11 % for E5M2. The scales of the operands are left out of both: a power of two apart, they
only shift where sums fall within a binade.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats as fp8_formats
from jax_fp8.array import ScaledArray
from jax_fp8.emulation.machines import MACHINES, Machine
from jax_fp8.emulation.overflow import OverflowWarning
from jax_fp8.quantize import quantize
from jax_fp8.scaled import scaled_dot_general

__all__ = ["DATA", "METRICS", "ErrorRow", "Study", "error_study"]

Samples = npt.NDArray[np.float64]
Sampler = Callable[[np.random.Generator, tuple[int, int]], Samples]

#: Distributions that operands can have. "left:right" names a pair, one name stands for both sides.
DATA: Final[Mapping[str, Sampler]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform01": lambda rng, shape: rng.random(shape),
    "uniform11": lambda rng, shape: rng.uniform(-1, 1, shape),
    "halfnormal": lambda rng, shape: np.abs(rng.standard_normal(shape)),
    "relu": lambda rng, shape: np.maximum(rng.standard_normal(shape), 0),
    "student_t3": lambda rng, shape: rng.standard_t(3, shape),
    "mean0.22": lambda rng, shape: rng.standard_normal(shape) + 0.22,
    "mean0.5": lambda rng, shape: rng.standard_normal(shape) + 0.5,
    "mean1": lambda rng, shape: rng.standard_normal(shape) + 1,
}
#: Fields of `ErrorRow` that measure an error, and how a table heads them.
METRICS: Final[Mapping[str, str]] = {
    "frobenius": "‖e‖ / ‖C‖",
    "bias": "mean(e · sign C) / mean |C|",
    "max_to_rms": "max |e| / rms C",
    "max_to_max": "max |e| / max |C|",
}
#: Largest magnitude of the operands of an FP16 accumulator, as exponents allow: 448 / 2^7 and
#: 57344 / 2^14. With it a sum of 5000 of the largest products still fits below 65504.
FP16_AMAX: Final = 3.5

_DIMS: Final = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """What one GEMM was off by. All errors are per cent; e = result - exact, C = exact.

    Attributes:
      machine: name of the accumulation model.
      data: distribution of the operands, "normal", or a pair, "relu:normal".
      k: products of each sum.
      interval: promotion interval, None for never.
      formats: of lhs and rhs, such as "e4m3fn·e4m3fn".
      narrow: whether the operands were kept small for an FP16 accumulator.
      shape: (m, n), the results that are measured.
      frobenius: ‖e‖ / ‖C‖, Frobenius norms.
      bias: mean(e · sign C) / mean |C|; negative where results are too small.
      max_to_rms: max |e| / rms C.
      max_to_max: max |e| / max |C|.
      non_finite: how many results are infinite or NaN; the errors are NaN where it is not 0.
    """

    machine: str
    data: str
    k: int
    interval: int | None
    formats: str
    narrow: bool
    shape: tuple[int, int]
    frobenius: float
    bias: float
    max_to_rms: float
    max_to_max: float
    non_finite: int

    @property
    def accumulator(self) -> str:
        """Machine and interval, as tables and plots name them."""
        machine = MACHINES[self.machine]
        interval = "never promoted" if self.interval is None else f"promoted every {self.interval}"
        overflows = ", amax / 448" if machine.is_fp16 and not self.narrow else ""
        return (
            self.machine if machine.ignores_interval else f"{self.machine}{overflows}, {interval}"
        )

    @property
    def non_finite_percent(self) -> float:
        """Share of the results that are infinite or NaN."""
        return 100 * self.non_finite / math.prod(self.shape)

    def as_json(self) -> dict[str, Any]:
        """The fields, None in place of NaN, which JSON does not have."""
        fields = dataclasses.asdict(self) | {"non_finite_percent": self.non_finite_percent}
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in fields.items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Every combination of some machines, data, promotion intervals and K.

    `len(study)` is the number of rows, `study.rows()` measures them one by one. All machines get
    the same operands, except that FP16 ones get smaller codes; a row does not depend on the others.

    Attributes:
      machines: names of `MACHINES`.
      data: names of `DATA`, or pairs "lhs:rhs" of them.
      intervals: promotion intervals, None for never. Machines that are never promoted have one row.
      ks: lengths of the sums.
      shape: (m, n).
      seed: of the data.
      formats: of lhs and rhs, as `formats.lookup` takes them.
      fp16_scales: "narrow": an FP16 accumulator gets operands with scale amax / 3.5, so that its
        sums stay below 65504; "amax": amax / 448 as all others, and most of them overflow.
    """

    machines: tuple[str, ...]
    data: tuple[str, ...] = ("normal",)
    intervals: tuple[int | None, ...] = (None, 128)
    ks: tuple[int, ...] = (32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    shape: tuple[int, int] = (64, 64)
    seed: int = 0
    formats: tuple[str, str] = ("e4m3", "e4m3")
    fp16_scales: Literal["narrow", "amax"] = "narrow"

    def __post_init__(self) -> None:
        call = "error_study"
        for name in self.machines:
            if name not in MACHINES:
                raise ValueError(f"{call}: no machine {name!r}; there are {', '.join(MACHINES)}")
        for pair in self.data:
            _sides(pair)
        for size in (*self.ks, *self.shape):
            if size < 1:
                raise ValueError(f"{call}: a size is {size}; K, M and N must be at least 1")
        for machine, interval in itertools.product(self._machines, self.intervals):
            _check_interval(machine, interval)
        for fmt in self.formats:
            fp8_formats.lookup(fmt, call=call)
        if self.fp16_scales not in ("narrow", "amax"):
            raise ValueError(f"{call}: fp16_scales is {self.fp16_scales!r}, not narrow or amax")

    @property
    def _machines(self) -> list[Machine]:
        return [MACHINES[name] for name in self.machines]

    @property
    def _accumulators(self) -> list[tuple[Machine, int | None]]:
        return [
            (machine, interval)
            for machine in self._machines
            for interval in ((None,) if machine.ignores_interval else self.intervals)
        ]

    def __len__(self) -> int:
        return len(self.data) * len(self.ks) * len(self._accumulators)

    def rows(self) -> Iterator[ErrorRow]:
        """Measures row by row: for each data, for each K, for each machine and interval."""
        for data, k in itertools.product(self.data, self.ks):
            problems: dict[bool, _Problem] = {}
            for machine, interval in self._accumulators:
                narrow = machine.is_fp16 and self.fp16_scales == "narrow"
                if narrow not in problems:
                    problems[narrow] = self._problem(data, k, narrow=narrow)
                yield self._measure(problems[narrow], data, machine, interval)

    def _problem(self, data: str, k: int, *, narrow: bool) -> _Problem:
        rng = np.random.default_rng((self.seed, k))
        lhs, rhs = (
            _codes(DATA[name](rng, (size, k)), fmt, narrow=narrow)
            for name, size, fmt in zip(_sides(data), self.shape, self.formats, strict=True)
        )
        return _Problem(lhs, rhs, narrow, lhs.astype(np.float64) @ rhs.astype(np.float64).T)

    def _measure(
        self, problem: _Problem, data: str, machine: Machine, interval: int | None
    ) -> ErrorRow:
        result = problem.result(machine, interval)
        error, exact = result - problem.exact, problem.exact
        non_finite = int(np.count_nonzero(~np.isfinite(result)))
        with np.errstate(invalid="ignore", divide="ignore"):
            size, rms = np.abs(exact), np.sqrt(np.mean(exact**2))
            errors = {
                "frobenius": np.linalg.norm(error) / np.linalg.norm(exact),
                "bias": np.mean(error * np.sign(exact)) / np.mean(size),
                "max_to_rms": np.max(np.abs(error)) / rms,
                "max_to_max": np.max(np.abs(error)) / np.max(size),
            }
        return ErrorRow(
            machine=machine.name,
            data=data,
            k=problem.lhs.shape[1],
            interval=interval,
            formats="·".join(fp8_formats.lookup(fmt).name for fmt in self.formats),
            narrow=problem.narrow,
            shape=self.shape,
            non_finite=non_finite,
            **{name: math.nan if non_finite else float(100 * x) for name, x in errors.items()},
        )


def error_study(
    machine: str | Sequence[str],
    data: str | Sequence[str] = "normal",
    intervals: Sequence[int | None] = (None, 128),
    ks: Sequence[int] = (32, 128, 512, 1024, 2048, 4096, 8192, 16384),
    shape: tuple[int, int] = (64, 64),
    seed: int = 0,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    fp16_scales: Literal["narrow", "amax"] = "narrow",
) -> list[ErrorRow]:
    """How far a machine's sums are off, for data of a kind, against their length K.

    Operands are (m, K) and (n, K) random values, quantised with one scale, amax / format.max.

    Args:
      machine: a name of `MACHINES`, or several.
      data: a name of `DATA`, or a pair "lhs:rhs" such as "relu:normal", or several.
      intervals: promotion intervals, None for never, multiples of the machine's step.
      ks: lengths of the sums.
      shape: (m, n), as many results are measured.
      seed: of the data.
      formats: of lhs and rhs.
      fp16_scales: "narrow": FP16 accumulators get operands up to 3.5, which do not overflow;
        "amax": up to 448 as all others.

    Returns:
      A row for each data, K, machine and interval, in this order.

    Raises:
      ValueError: a name that there is not, or an interval that the machine cannot have.

    >>> for row in error_study("hopper_wgmma", "uniform01", ks=[4096], shape=(16, 16)):
    ...     print(row.interval, round(row.bias, 1))
    None -7.4
    128 -0.1
    """
    study = Study(
        machines=_tuple(machine),
        data=_tuple(data),
        intervals=tuple(intervals),
        ks=tuple(ks),
        shape=shape,
        seed=seed,
        formats=formats,
        fp16_scales=fp16_scales,
    )
    return list(study.rows())


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Codes (m, k) and (n, k), and their exact product (m, n)."""

    lhs: npt.NDArray[Any]
    rhs: npt.NDArray[Any]
    narrow: bool
    exact: npt.NDArray[np.float64]

    def result(self, machine: Machine, interval: int | None) -> npt.NDArray[np.float64]:
        lhs, rhs = (_scale_one(codes, machine) for codes in (self.lhs, self.rhs))
        with warnings.catch_warnings(), jax.default_device(jax.devices("cpu")[0]):
            warnings.simplefilter("ignore", OverflowWarning)  # a row counts what overflows
            out = scaled_dot_general(
                lhs,
                rhs,
                _DIMS,
                accumulation=machine.name,
                promotion_interval=interval,
                split_k=1,
            )
        return np.asarray(out, np.float64)


def _scale_one(codes: npt.NDArray[Any], machine: Machine) -> ScaledArray:
    rows, k = codes.shape
    if machine.scales_inside:
        scale = jnp.ones((rows, -(-k // 32)), fp8_formats.E8M0)
        return ScaledArray(jnp.asarray(codes), scale, (1, 32))
    return ScaledArray(jnp.asarray(codes), jnp.ones((1, 1), jnp.float32), (rows, k))


def _codes(x: Samples, fmt: str, *, narrow: bool) -> npt.NDArray[Any]:
    """Codes of x with one scale: largest magnitude format.max, or `FP16_AMAX`."""
    values = jnp.asarray(x, jnp.float32)
    q = quantize(values, fmt)
    if narrow:
        q = quantize(values, fmt, scale=q.scale * (fp8_formats.lookup(fmt).max / FP16_AMAX))
    return np.asarray(q.values)


def _sides(pair: str) -> tuple[str, str]:
    """Distributions of lhs and rhs: "relu:normal" is a pair, "relu" stands for "relu:relu"."""
    lhs, _, rhs = pair.partition(":")
    for name in (lhs, rhs or lhs):
        if name not in DATA:
            raise ValueError(
                f"error_study: data {pair!r}: there is no {name!r}; there are {', '.join(DATA)}, "
                "and pairs such as relu:normal"
            )
    return lhs, rhs or lhs


def _check_interval(machine: Machine, interval: int | None) -> None:
    if interval is not None and (interval < 1 or not machine.takes_interval(interval)):
        raise ValueError(
            f"error_study: {machine.name} cannot be promoted every {interval}: it adds "
            f"{machine.step} products at a time; give a multiple of {machine.step}, or none"
        )


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
