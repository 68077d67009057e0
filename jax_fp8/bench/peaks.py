"""The machine's own peaks, measured in the run whose figures they judge."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from jax_fp8 import _ffi
from jax_fp8.bench.timing import Timed, cpus

__all__ = [
    "PEAK_OF_ROW",
    "Peak",
    "Readers",
    "Workers",
    "multiply_peaks",
    "read_peak",
    "table",
    "timed_peaks",
]

#: Peak of the multiply instruction on which a GEMM row rests. AMX is its own peak: that a CPU has
#: it says nothing against a row that does not use it.
PEAK_OF_ROW: Final = {
    "amx": "amx",
    "avx512bf16": "avx512bf16",
    "avx512vbmi": "avx512",
    "avx512": "avx512",
    "avx2": "avx2",
    "scalar": "scalar",
}

#: Bytes that one load of the read loops takes together.
_READ_BYTES: Final = 512


@dataclasses.dataclass(frozen=True)
class Peak:
    """A limit of the machine.

    Attributes:
      name: of the loop, such as "avx512bf16" or "read_avx512".
      unit: "FLOP" or "byte".
      instruction: that does the work.
      why_not: why it cannot run here, or "".
      rates: units a second over all threads, one per measurement; empty if it did not run.
    """

    name: str
    unit: str
    instruction: str
    why_not: str
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """The best measurement: an instruction has a true limit, and disturbances only lower it."""
        return max(self.rates, default=math.nan)

    def as_json(self) -> dict[str, Any]:
        rate = self.rate if self.rates else None
        return dataclasses.asdict(self) | {"rate": rate}


def table() -> tuple[Peak, ...]:
    """Every peak of this build, nothing measured; the fastest first of each unit."""
    return tuple(Peak(row[0], row[1], row[2], row[3]) for row in _ffi.peaks())


def read_peak() -> Peak:
    """The widest loads of this machine."""
    return next(peak for peak in table() if peak.unit == "byte" and not peak.why_not)


class Workers:
    """Threads that run something at the same time, each on a CPU of its own where that can be.

    Args:
      count: threads; for a single one the calling thread does the work.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._pools: list[concurrent.futures.ThreadPoolExecutor] = []
        if count > 1:
            own = sorted(cpus())
            for i in range(count):
                pin = functools.partial(_pin_thread, own[i % len(own)])
                self._pools.append(concurrent.futures.ThreadPoolExecutor(1, initializer=pin))

    def run(self, work: Sequence[Callable[[], Any]]) -> tuple[list[Any], float]:
        """Runs one piece of work on each thread.

        Returns:
          What each returned, and the seconds from the first start to the last end.
        """
        if not self._pools:
            begin = time.perf_counter()
            out = work[0]()
            return [out], time.perf_counter() - begin
        futures = [
            pool.submit(self._one, piece) for pool, piece in zip(self._pools, work, strict=True)
        ]
        done = [future.result() for future in futures]
        begin = min(one[1] for one in done)
        return [one[0] for one in done], max(one[2] for one in done) - begin

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()

    def _one(self, piece: Callable[[], Any]) -> tuple[Any, float, float]:
        self._barrier.wait()
        begin = time.perf_counter()
        out = piece()
        return out, begin, time.perf_counter()


def _pin_thread(cpu: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})  # of the calling thread


def multiply_peaks(
    threads: int, *, seconds: float = 0.02, repeats: int = 9, names: Sequence[str] | None = None
) -> list[Peak]:
    """Measures the multiply instructions.

    Args:
      threads: that run at the same time.
      seconds: of one measurement.
      repeats: measurements of each.
      names: of peaks; None is all. One that cannot run here keeps its reason.

    >>> [scalar] = multiply_peaks(1, seconds=0.001, repeats=1, names=["scalar"])
    >>> scalar.rate > 1e6
    True
    """
    workers = Workers(threads)
    measured = []
    for peak in table():
        if peak.unit != "FLOP" or (names is not None and peak.name not in names):
            continue
        rates: list[float] = []
        for _ in range(0 if peak.why_not else repeats):
            piece = functools.partial(_ffi.measure_multiply, peak.name, seconds)
            done, _wall = workers.run([piece] * threads)
            rates.append(sum(flops / own for flops, own in done))
        measured.append(dataclasses.replace(peak, rates=tuple(rates)))
    workers.close()
    return measured


def timed_peaks(names: Iterable[str], threads: int) -> dict[str, Timed]:
    """Multiply instructions as contenders, which take turns with others.

    Args:
      names: of peaks that run here.
      threads: that run at the same time.

    Returns:
      By name, calls that return the seconds of one GFLOP.
    """

    def seconds_of_gflop(name: str) -> float:
        [peak] = multiply_peaks(threads, seconds=0.002, repeats=1, names=[name])
        return 1e9 / peak.rate

    return {
        name: Timed(functools.partial(seconds_of_gflop, name), own_clock=True) for name in names
    }


class Readers:
    """Reads memory on several threads: a piece at a time, round and round, so that it stays cold.

    Args:
      piece_bytes: read by one call, over all threads.
      footprint_bytes: after which the same memory comes again; at least the piece.
      threads: each reads its own part of the piece.
      huge_pages: whether the memory is asked to be on pages of 2 MB; else it is on the pages that
        an array of JAX gets, usually of 4 KB, where reading DRAM waits for address translations.
    """

    def __init__(
        self, piece_bytes: int, footprint_bytes: int, threads: int, *, huge_pages: bool = False
    ) -> None:
        self.name = read_peak().name
        unit = _READ_BYTES * threads
        self._own_bytes = max(1, piece_bytes // unit) * _READ_BYTES
        self.piece_bytes = self._own_bytes * threads
        self.num_pieces = max(1, -(-footprint_bytes // self.piece_bytes))
        self._workers = Workers(threads)
        own = self._own_bytes * self.num_pieces
        self._buffers = [_ffi.ReadBuffer(own, huge_pages) for _ in range(threads)]
        self._next = 0

    def read(self) -> float:
        """Reads the next piece; returns seconds."""
        first = self._next * self._own_bytes
        self._next = (self._next + 1) % self.num_pieces
        work = [
            functools.partial(buffer.read, self.name, first, self._own_bytes)
            for buffer in self._buffers
        ]
        done, _wall = self._workers.run(work)  # of which a part is not reading, see ReadBuffer
        return max(done)

    def bandwidth(self, repeats: int) -> Peak:
        """Measures it without rivals, after a pass over the footprint."""
        for _ in range(self.num_pieces):
            self.read()
        rates = [self.piece_bytes / self.read() for _ in range(repeats)]
        return dataclasses.replace(read_peak(), rates=tuple(rates))

    def close(self) -> None:
        self._workers.close()
        self._buffers.clear()
