"""`decode`: few rows against weights that no cache holds, as when a model writes token by token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from jax_fp8.bench.cases import READ, Case, Contender, Options, Preset, Shape
from jax_fp8.bench.contenders import Gemm, gemm_contenders, ours
from jax_fp8.bench.memory import last_level_cache_bytes
from jax_fp8.bench.operands import LAYOUTS, PREPARED, Weights
from jax_fp8.bench.peaks import Readers
from jax_fp8.bench.timing import Timed

__all__ = ["CLIFF_ROWS", "DECODE"]

#: M of the steps time(M + 1) / time(M) that `--cliff` looks at.
CLIFF_ROWS: Final = range(8, 65)


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    for (n, k), group in itertools.groupby(shapes, key=lambda shape: shape[1:]):
        weights = Weights(n, k, options.seed, options.footprint_bytes)
        readers = Readers(n * k, options.footprint_bytes, options.threads)
        notes = [
            f"cold weights: {weights.copies(1)} copies of {n * k / 2**20:.3g} MiB (FP8) take "
            "turns, and as many of other dtypes as fill the same footprint",
        ]
        cache = last_level_cache_bytes()
        if cache is not None and cache > options.footprint_bytes:
            notes.append(
                f"the third-level cache of {cache / 2**20:.0f} MiB is larger than one footprint; "
                "what evicts are the footprints of all contenders together"
            )
        for m, _, _ in group:
            gemm = Gemm(m, weights, options)
            machine = Contender(
                name="read as many bytes",
                group=READ,
                kind="machine",
                timed=Timed(readers.read, own_clock=True),
                counted_bytes=readers.piece_bytes,
                peak=READ,
            )
            rivals = gemm_contenders(
                gemm,
                ("tensor", "block"),
                cut,
                dtypes=("f32", "bf16", "f8"),
                peak=READ,
                tiled=False,
                layouts=(*LAYOUTS, PREPARED),
            )
            yield Case(
                name=f"M = {m}, {n} x {k}",
                shape=(m, n, k),
                contenders=[machine, *rivals],
                rate="GB/s",
                notes=notes,
            )
        if options.cliff:
            yield _cliff(weights, options, notes)
        readers.close()


def _cliff(weights: Weights, options: Options, notes: Sequence[str]) -> Case:
    n, k = weights.array.shape
    recipes = options.recipes or ("block",)
    contenders = []
    for m in (*CLIFF_ROWS, CLIFF_ROWS.stop):
        for own in ours(Gemm(m, weights, options), recipes, layouts=("(N,K)",)):
            name = _cliff_name(own.group, m)
            contenders.append(dataclasses.replace(own, name=name, group=name))
    return Case(
        name=f"cliff, {n} x {k}",
        shape=(CLIFF_ROWS.stop, n, k),
        contenders=contenders,
        steps=[
            (_cliff_name(recipe, m + 1), _cliff_name(recipe, m))
            for recipe in recipes
            for m in CLIFF_ROWS
        ],
        notes=(
            *notes,
            "our rows only, weights (N,K); a step is time(M + 1) / time(M), least times",
        ),
    )


def _cliff_name(recipe: str, m: int) -> str:
    return f"{recipe}, M = {m}"


_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)

DECODE: Final = Preset(
    title="few rows, cold weights",
    shapes=[(m, 4096, 4096) for m in _ROWS],
    quick=[(m, 4096, 4096) for m in (1, 8, 32)],
    cases=_cases,
    notes=(
        "GB/s are the bytes of the weights in their own dtype; the share is of reading as many "
        "bytes as the FP8 weights have, in turn with the contenders, over the same footprint",
        "weights in both layouts, ours also prepared; the fastest counts, for us and for peers",
    ),
)
