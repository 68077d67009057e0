"""What speed is aimed at, and the floors that `bench --check` holds the kernels to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["MACHINE", "TARGETS", "Outcome", "Target", "evaluate", "failures"]

#: Where the targets come from; figures of another machine mean something else.
MACHINE: Final = "a 2-core Zen 4 with AVX512-BF16 and without AMX"

Shape = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Target:
    """An aim and a floor for one figure of some cases.

    Attributes:
      preset: name.
      where: shapes that it is about, in words.
      applies: whether a shape is one of them.
      group: contender, the faster of its layouts.
      metric: "share" (of the measured peak), "GMAC/s per thread", "µs", "largest step", or the
        group of a peer, whose time is divided by ours.
      aim: what is aimed at.
      floor: what must be reached.
      at_most: whether less is better.
      threads: 1, or 2 for several; None for any number.
    """

    preset: str
    where: str
    applies: Callable[[Shape], bool]
    group: str
    metric: str
    aim: float
    floor: float
    at_most: bool = False
    threads: int | None = None

    def verdict(self, value: float) -> str:
        """ "aim met", "floor met" or "missed".

        >>> target = TARGETS[0]
        >>> target.verdict(target.aim), target.verdict(target.floor), target.verdict(0.0)
        ('aim met', 'floor met', 'missed')
        """
        for limit, verdict in ((self.aim, "aim met"), (self.floor, "floor met")):
            if (value <= limit) if self.at_most else (value >= limit):
                return verdict
        return "missed"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A target beside what one case reached."""

    preset: str
    case: str
    group: str
    metric: str
    value: float
    aim: float
    floor: float
    at_most: bool
    verdict: str

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "at least"
        return (
            f"{self.preset}, {self.case}, {self.group}: {self.metric} is {self.value:.3g}, "
            f"floor {bound} {self.floor:g} (aim {self.aim:g}): {self.verdict}"
        )


def _cube(least: int, most: float = math.inf) -> Callable[[Shape], bool]:
    return lambda shape: least <= min(shape) and max(shape) <= most


def _rows(m: int) -> Callable[[Shape], bool]:
    return lambda shape: tuple(shape) == (m, 4096, 4096)


def _any(shape: Shape) -> bool:
    return True


def _wide(shape: Shape) -> bool:
    return tuple(shape[1:]) == (4096, 4096)


def _square() -> Iterable[Target]:
    large, small = ("1024³ and larger", _cube(1024)), ("512³", _cube(512, 512))
    for group, aim, floor in (
        ("tensor", 0.90, 0.78),
        ("row", 0.90, 0.78),
        ("block", 0.88, 0.72),
    ):
        yield Target("square", *large, group, "share", aim, floor, threads=1)
        yield Target("square", *large, group, "share", 0.83, 0.65, threads=2)
        yield Target("square", *small, group, "share", 0.80, 0.65, threads=1)
    for peer, aim, floor in (
        ("XLA f32", 2.2, 1.6),
        ("XLA f8", 2.3, 1.7),
        ("XLA bf16", 1.1, 0.95),
        ("torch bf16", 1.0, 0.85),
        ("torch _scaled_mm", 3.0, 2.2),
    ):
        yield Target("square", "512³ and larger", _cube(512), "block", peer, aim, floor)
    yield Target("square", "1024³", _cube(1024, 1024), "block", "qwix tiled", 200, 50)


def _decode() -> Iterable[Target]:
    for m, peer, aim, floor in (
        (1, "share", 0.80, 0.60),
        (1, "XLA f32", 2.7, 1.8),
        (1, "XLA bf16", 25, 12),
        (1, "XLA f8", 25, 12),
        (1, "torch bf16", 2.7, 1.8),
        (8, "XLA bf16", 1.8, 1.3),
        (32, "torch bf16", 1.0, 0.85),
    ):
        where = f"M = {m}, N = K = 4096"
        yield Target("decode", where, _rows(m), "block", peer, aim, floor)
    yield Target(
        "decode", "M = 8 to 64", _any, "block", "largest step", 1.25, 1.25, at_most=True
    )  # fmt: skip


TARGETS: Final[tuple[Target, ...]] = (
    *_square(),
    *_decode(),
    Target("quantize", "any", _any, "1x128", "XLA", 2.5, 1.5),
    Target("train", "4096 wide", _wide, "block f32", "XLA f32", 1.5, 1.2),
    Target("train", "4096 wide", _wide, "block bf16", "XLA bf16", 1.0, 0.9),
    Target("emulate", "any", _any, "hopper_wgmma", "GMAC/s per thread", 20, 12),
    Target("overhead", "any", _any, "tensor", "µs", 20, 20, at_most=True),
    Target("overhead", "any", _any, "block", "µs", 20, 20, at_most=True),
)


def evaluate(
    presets: Sequence[Mapping[str, Any]], threads: int, targets: Sequence[Target] | None = None
) -> list[Outcome]:
    """Every target that is about something that was measured.

    Args:
      presets: as in the JSON of the command.
      threads: that ran.
      targets: to hold it to; None is `TARGETS`.
    """
    targets = TARGETS if targets is None else targets
    outcomes = []
    for preset in presets:
        for case in preset["cases"]:
            for target in targets:
                if target.preset != preset["name"] or not target.applies(case["shape"]):
                    continue
                if target.threads not in (None, min(threads, 2)):
                    continue
                value = _value(target, case)
                if value is not None:
                    outcomes.append(_outcome(target, case["name"], value))
    return outcomes


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each floor that is missed, or one that nothing was held to any."""
    if not outcomes:
        return ["bench --check: no target is about what was measured"]
    return [str(outcome) for outcome in outcomes if outcome.verdict == "missed"]


def _outcome(target: Target, case: str, value: float) -> Outcome:
    return Outcome(
        preset=target.preset,
        case=case,
        group=target.group,
        metric=target.metric,
        value=value,
        aim=target.aim,
        floor=target.floor,
        at_most=target.at_most,
        verdict=target.verdict(value),
    )


def _value(target: Target, case: Mapping[str, Any]) -> float | None:
    """The figure of a case, or None if it has none."""
    if target.metric == "largest step":
        steps = [step for name, step in case["steps"].items() if name.startswith(target.group)]
        return max(steps, default=None)
    if case["steps"] or target.group not in case["best"]:
        return None
    name = case["best"][target.group]
    row = next(row for row in case["contenders"] if row["name"] == name)
    if target.metric == "share":
        share: float | None = row["share"]
        return share
    if target.metric == "GMAC/s per thread":
        gmacs: float | None = row["gmacs_per_thread"]
        return gmacs
    if target.metric == "µs":
        return 1e6 * float(row["median"])
    ratio: float | None = case["ratios"].get(target.group, {}).get(target.metric)
    return ratio
