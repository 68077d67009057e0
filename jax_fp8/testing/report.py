"""What the gradient checks found: a row per check, as a table, JSON or the text of an error."""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["CheckResult", "VjpReport"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check measured.

    Attributes:
      id: "C1" to "C9".
      name: what is checked, in a few words.
      formula: what `value` is.
      value: measured; the worst over result and gradients. NaN where nothing was measured.
      limit: (least, largest) value that passes; None for a report that cannot fail.
      tensor: where the worst value was: "y", or the gradient "dx" of lhs or "dw" of rhs.
      index: index of the worst element in that tensor, if it is an element.
      detail: the worst element's operands and codes, or other facts, in sentences.
      explain: finds what most likely is wrong, for `cause`.
      not_applicable: why nothing was measured; empty if it was.
    """

    id: str
    name: str
    formula: str
    value: float = math.nan
    limit: tuple[float, float] | None = None
    tensor: str = ""
    index: tuple[int, ...] | None = None
    detail: str = ""
    explain: Callable[[], str] | None = dataclasses.field(default=None, repr=False)
    not_applicable: str = ""

    @property
    def failed(self) -> bool:
        """Whether the value is out of its limit."""
        if self.not_applicable or self.limit is None:
            return False
        low, high = self.limit
        return not low <= self.value <= high

    @functools.cached_property
    def cause(self) -> str:
        """What most likely is wrong; empty unless the check failed."""
        return self.explain() if self.failed and self.explain is not None else ""

    @property
    def verdict(self) -> str:
        """ "passed", "FAILED", "report" or "not applicable"."""
        if self.not_applicable:
            return "not applicable"
        return "FAILED" if self.failed else "report" if self.limit is None else "passed"

    @property
    def limit_text(self) -> str:
        """The limit as it is read: "<= 2" or "in [0.9, 1.1]"."""
        if self.limit is None:
            return ""
        low, high = self.limit
        if math.isinf(high):
            return f">= {low:.4g}"
        return f"<= {high:.4g}" if low <= 0 else f"in [{low:.3g}, {high:.3g}]"

    def __str__(self) -> str:
        text = [f"{self.id} {self.name}: {self.verdict}"]
        if self.not_applicable:
            return f"{text[0]}: {self.not_applicable}"
        at = "" if self.index is None else f" at {self.index}"
        of = f" of {self.tensor}{at}" if self.tensor else ""
        text.append(f"  measured      {self.value:.6g}{of}; limit {self.limit_text or 'none'}")
        text.append(f"  formula       {self.formula}")
        text += [f"  {self.detail}"] if self.detail else []
        text += [f"  likely cause  {self.cause}"] if self.cause else []
        return "\n".join(text)

    def as_json(self) -> dict[str, Any]:
        """Fields as JSON has them: no NaN and no infinity."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "explain")
        fields = {name: getattr(self, name) for name in names}
        fields |= {"cause": self.cause, "verdict": self.verdict}
        fields["value"] = self.value if math.isfinite(self.value) else None
        if self.limit is not None:
            fields["limit"] = [v if math.isfinite(v) else None for v in self.limit]
        return fields


@dataclasses.dataclass(frozen=True)
class VjpReport:
    """Results of all checks of one op, in order; `report["C6"].value` is one of them."""

    results: tuple[CheckResult, ...]

    def __iter__(self) -> Iterator[CheckResult]:
        return iter(self.results)

    def __getitem__(self, id: str) -> CheckResult:
        return next(result for result in self.results if result.id == id)

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """What failed."""
        return tuple(result for result in self.results if result.failed)

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    def table(self) -> Table:
        """The results for a terminal."""
        table = Table("check", "what", "measured", "limit", "where", "verdict")
        for r in self.results:
            value = "" if math.isnan(r.value) else f"{r.value:.4g}"
            where = r.tensor + ("" if r.index is None else f" {r.index}")
            verdict = f"{r.verdict}: {r.not_applicable}" if r.not_applicable else r.verdict
            table.add_row(r.id, r.name, value, r.limit_text, where, verdict)
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self.table())
        return text.getvalue()

    def as_json(self) -> list[dict[str, Any]]:
        """The results for a program."""
        return [result.as_json() for result in self.results]
