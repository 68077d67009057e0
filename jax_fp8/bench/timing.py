"""Honest times: contenders in turn, a pause before each call, and every sample kept.

All contenders are warmed up, then they take turns, so that a disturbance of the machine hits
all of them. XLA's and OpenMP's threads spin for a while after a call and would take the next
contender's CPU: hence the pause.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax

__all__ = [
    "MIN_ROUNDS",
    "PAUSE_SECONDS",
    "Timed",
    "Times",
    "compiled",
    "cpus",
    "cube_rate",
    "median_seconds",
    "round_robin",
    "use_cpus",
]

#: Longer than any of these libraries' threads spin.
PAUSE_SECONDS: Final = 0.03
#: Rounds, whatever the budget.
MIN_ROUNDS: Final = 3


@dataclasses.dataclass(frozen=True)
class Times:
    """Wall times of one contender, in seconds of one call.

    >>> times = Times((3.0, 1.0, 2.0, 10.0))
    >>> times.median, times.best
    (2.5, 1.0)
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one, both a sample or a mean of two; (x, x) of a single one."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper


@dataclasses.dataclass(frozen=True)
class Timed:
    """What is timed.

    Attributes:
      call: does the work and waits for its end.
      calls: how often a sample calls it, where one call is too short for a clock.
      own_clock: `call` returns its seconds, so that the start of its threads does not count.
      before: is called before each sample, untimed.
    """

    call: Callable[[], Any]
    calls: int = 1
    own_clock: bool = False
    before: Callable[[], Any] | None = None

    def sample(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of one call."""
        if self.before is not None:
            self.before()
        if self.own_clock:
            return float(sum(self.call() for _ in range(self.calls))) / self.calls
        begin = clock()
        for _ in range(self.calls):
            self.call()
        return (clock() - begin) / self.calls


def round_robin(
    contenders: Mapping[str, Timed],
    *,
    repeats: int,
    budget_seconds: float,
    pause_seconds: float = PAUSE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Times]:
    """Times contenders in turn. Each must have been called before, so that it is warm.

    Args:
      contenders: by name, in the order in which they run.
      repeats: samples of each, at least 1.
      budget_seconds: no new round begins after so long, once there were `MIN_ROUNDS` (or
        `repeats`, if those are fewer). A contender whose samples take a quarter of the budget sits
        out from then on, so that the others get theirs.
      pause_seconds: before each call.
      clock: seconds that have passed.
      sleep: waits for some seconds.

    Returns:
      Times by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    least = min(MIN_ROUNDS, repeats)
    begin = clock()
    for done in range(repeats):
        if done >= least and clock() - begin > budget_seconds:
            break
        for name, timed in contenders.items():
            own = samples[name]
            if sum(own) * timed.calls > budget_seconds / 4:
                continue
            sleep(pause_seconds)
            own.append(timed.sample(clock))
    return {name: Times(tuple(own)) for name, own in samples.items()}


def compiled(fn: Callable[..., Any], *operands: Any) -> Callable[..., Any]:
    """`fn`, compiled for these operands; returns when its result is there."""
    executable = jax.jit(fn).lower(*operands).compile()
    return lambda *args: jax.block_until_ready(executable(*args))


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median wall time of `call`, after one that does not count; for a contender without rivals."""
    call()
    return Times(tuple(Timed(call).sample() for _ in range(repeats))).median


def cube_rate(call_of: Callable[[int], Callable[[], Any]]) -> float:
    """FLOP/s of a product of cubes, to tell a slow contender from afar.

    The size doubles from 128 to 1024 while that takes a moment only: what a call costs by itself
    must not pass for slowness.

    Args:
      call_of: maps the size of a cube to its product.
    """
    rate = 0.0
    for size in (128, 256, 512, 1024):
        flops = 2.0 * size**3
        if rate and flops / rate > 0.5:
            break
        timed = Timed(call_of(size))
        timed.call()
        rate = flops / min(timed.sample() for _ in range(2))
    return rate


def cpus() -> set[int]:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def use_cpus(count: int) -> None:
    """Keeps this process on its first CPUs; call it before JAX starts its backend and thread pool.

    Raises:
      ValueError: it has fewer than `count`, or the system cannot keep a process on some of them.
    """
    own = sorted(cpus())
    if not 1 <= count <= len(own):
        raise ValueError(f"this process may use {len(own)} CPUs, not {count}")
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("this system cannot keep a process on some of its CPUs")
    os.sched_setaffinity(0, own[:count])
