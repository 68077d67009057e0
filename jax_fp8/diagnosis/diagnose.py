"""`diagnose`: captures, measures and judges; a `Diagnosis` holds all figures and shows them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_fp8.diagnosis.capture import Captured, Gemm, Operand, capture
from jax_fp8.diagnosis.gemm_stats import DEFAULT_MACHINE, GemmStats, error_against_k, study_gemm
from jax_fp8.diagnosis.stats import TensorStats, study
from jax_fp8.diagnosis.verdicts import Study, Verdict, judge
from jax_fp8.emulation.machines import MACHINES

__all__ = ["Curve", "Diagnosis", "diagnose"]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Error of the sums of one GEMM against K, in per cent.

    Attributes:
      name: of the GEMM.
      points: (k, never promoted, promoted every 128); the last k is that of the GEMM.
    """

    name: str
    points: tuple[tuple[int, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What FP8 does to a function. `print` it, or write it with `to_html` and `to_json`.

    Attributes:
      verdicts: what is wrong and what to do, the worst first.
      gemms: a line for each FP8 GEMM.
      tensors: a line for each quantised copy of a tensor.
      curves: error against K of the deepest GEMM of each direction.
      machine: whose accumulator was emulated.
      differentiated: whether gradients are among the GEMMs.
      notices: what was not seen.
    """

    verdicts: tuple[Verdict, ...]
    gemms: tuple[GemmStats, ...]
    tensors: tuple[TensorStats, ...]
    curves: tuple[Curve, ...]
    machine: str
    differentiated: bool
    notices: tuple[str, ...]

    @property
    def is_bad(self) -> bool:
        """Whether a verdict is "bad", for an exit status."""
        return any(verdict.severity == "bad" for verdict in self.verdicts)

    def __str__(self) -> str:
        from jax_fp8.diagnosis.report import as_text

        return as_text(self)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from jax_fp8.diagnosis.report import renderables

        yield from renderables(self)

    def to_html(
        self, path: str | Path, history: Sequence[tuple[Any, Mapping[str, Any]]] = ()
    ) -> Path:
        """Writes one HTML file that needs nothing else.

        Args:
          path: file to write.
          history: (step, stats) as `watch` gave them: adds amax and flushed shares over steps.

        Returns:
          The path.
        """
        from jax_fp8.diagnosis.html import as_html

        path = Path(path)
        path.write_text(as_html(self, history), "utf-8")
        return path

    def to_png(self, path: str | Path) -> Path:
        """Draws flush shares, error maps and error against K with matplotlib (extra `plot`)."""
        from jax_fp8.diagnosis.png import draw

        return draw(self, Path(path))

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON has them: None in place of NaN and infinity."""
        found: dict[str, Any] = _jsonable(dataclasses.asdict(self))
        return found

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as text; also written to `path` if given."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False)
        if path is not None:
            Path(path).write_text(text, "utf-8")
        return text


def diagnose(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    machine: str = DEFAULT_MACHINE,
) -> Diagnosis:
    """Runs a loss and its gradient once, and finds where FP8 hurts in it and why.

    It sees every FP8 GEMM of this package, forward and both gradients, in jit, scan, remat, cond
    and Flax modules. Layers are named by `jax.named_scope`, by Flax's module path, or by the path
    of their weight in the arguments.

    Args:
      fn: a loss, or any function that jax can trace; gradients are taken if it returns a scalar.
      *args: its arguments, pytrees of arrays. Every operand is kept in memory at once.
      argnums: arguments to differentiate, as for `jax.grad`.
      has_aux: whether fn returns (loss, anything).
      machine: accumulation model of `emulation.MACHINES` that sums are tried with.

    Returns:
      Verdicts and figures, see `Diagnosis`.

    Raises:
      ValueError: there is no such machine, or fn has no FP8 GEMM that could be seen.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> x = jnp.ones((64, 32)).at[3, 5].set(1e7)
    >>> found = diagnose(lambda w, x: fp8.matmul(x, w["up"], recipe=fp8.TensorScaling()).sum(),
    ...                  {"up": jnp.ones((32, 16))}, x)
    >>> found.verdicts[0].rule, found.verdicts[0].layer, found.verdicts[0].tensor
    ('spike', 'up', 'x')
    """
    if machine not in MACHINES:
        raise ValueError(f"diagnose: no machine {machine!r}; there are {', '.join(MACHINES)}")
    captured = capture(fn, *args, argnums=argnums, has_aux=has_aux)
    if not captured.gemms and not captured.loose:
        seen = "; ".join(captured.notices) or "does it call jax_fp8?"
        raise ValueError(f"diagnose: the function has no FP8 GEMM that could be seen: {seen}")
    return measure(captured, machine)


def measure(captured: Captured, machine: str = DEFAULT_MACHINE) -> Diagnosis:
    """The diagnosis of what was captured."""
    tensors: dict[Any, TensorStats] = {}

    def stats(operand: Operand) -> TensorStats:
        key = (operand.layer, operand.role, operand.directions, operand.tile, operand.codes.shape)
        if key not in tensors:
            tensors[key] = study(operand)
        return tensors[key]

    studies = [
        Study(study_gemm(gemm, machine), stats(gemm.lhs), stats(gemm.rhs))
        for gemm in captured.gemms
    ]
    loose = [stats(operand) for operand in captured.loose]
    return Diagnosis(
        verdicts=judge(studies, loose),
        gemms=tuple(s.gemm for s in studies),
        tensors=_once(tensors.values()),
        curves=tuple(
            Curve(gemm.name, tuple(error_against_k(gemm, machine)))
            for gemm in _deepest(captured.gemms)
        ),
        machine=machine,
        differentiated=captured.differentiated,
        notices=captured.notices,
    )


def _once(tensors: Any) -> tuple[TensorStats, ...]:
    """One line for codes that several GEMMs take, though in another layout."""
    found: dict[Any, TensorStats] = {}
    for t in tensors:
        key = (t.layer, t.role, t.directions) if len(t.directions) > 1 else id(t)
        found.setdefault(key, t)
    return tuple(found.values())


def _deepest(gemms: Sequence[Gemm]) -> list[Gemm]:
    deepest: dict[str, Gemm] = {}
    for gemm in gemms:
        if gemm.direction not in deepest or gemm.k > deepest[gemm.direction].k:
            deepest[gemm.direction] = gemm
    return [gemm for gemm in deepest.values() if gemm.k]


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
