"""What a call, a context or a recipe can say about how its GEMMs add up."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final, Generic, NamedTuple, TypeVar

from jax_fp8.emulation.machines import MACHINES

__all__ = ["UNSET", "PerGemm", "Sums", "Unset"]

_T = TypeVar("_T")


class Unset(enum.Enum):
    """Type of `UNSET`, the default of arguments that a context or a recipe may also give.

    An enum, so that copies and pickles of a recipe are equal to it.
    """

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET


class PerGemm(NamedTuple, Generic[_T]):
    """A value for each of the three GEMMs of a differentiable call; what is left out stays unset.

    Attributes:
      forward: the product itself.
      dgrad: gradients of operands with the role "input".
      wgrad: gradients of operands with the role "weight".

    >>> PerGemm(wgrad=128)
    PerGemm(forward=UNSET, dgrad=UNSET, wgrad=128)
    """

    forward: _T = UNSET  # type: ignore[assignment]
    dgrad: _T = UNSET  # type: ignore[assignment]
    wgrad: _T = UNSET  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Sums:
    """accumulation, promotion_interval and split_k as they were given: a value, a `PerGemm`, UNSET.

    `config.executions` finds which of several counts.
    """

    accumulation: Any = UNSET
    promotion_interval: Any = UNSET
    split_k: Any = UNSET

    def checked(self, call: str) -> Sums:
        """Returns itself, or raises ValueError for a value that no GEMM can take."""
        for name, check in _CHECKS.items():
            given = getattr(self, name)
            for value in given if isinstance(given, PerGemm) else (given,):
                if not isinstance(value, Unset):
                    check(value, f"{call}: {name} is {value!r}")
        check_interval(self.accumulation, self.promotion_interval, call)
        return self


def check_interval(accumulation: Any, interval: Any, call: str) -> None:
    """Raises ValueError if both are single values, and the model cannot be promoted so often."""
    if not isinstance(accumulation, str) or not isinstance(interval, int):
        return
    machine = MACHINES.get(accumulation)
    if machine is not None and not machine.takes_interval(interval):
        raise ValueError(
            f"{call}: promotion_interval is {interval}, but {machine.name} adds {machine.step} "
            f"products at a time: give None or a multiple of {machine.step}"
        )


def _check_accumulation(value: Any, what: str) -> None:
    if not isinstance(value, str) or value not in ("native", *MACHINES):
        raise ValueError(
            f"{what}; there is no such accumulation model; there are native, {', '.join(MACHINES)}"
        )


def _check_interval(value: Any, what: str) -> None:
    if value is not None and not _is_count(value):
        raise ValueError(f"{what}; it must be None or an integer >= 1")


def _check_split(value: Any, what: str) -> None:
    if not _is_count(value):
        raise ValueError(f"{what}; it must be an integer >= 1")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_CHECKS: Final = {
    "accumulation": _check_accumulation,
    "promotion_interval": _check_interval,
    "split_k": _check_split,
}
