"""`quantize`: float32 to FP8 and scales, against XLA's code for the same formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import config, lowering
from jax_fp8.array import ScaledArray
from jax_fp8.bench.cases import READ, Case, Contender, Options, Preset, Shape
from jax_fp8.bench.contenders import forced
from jax_fp8.bench.operands import Inputs, float64_of, relative_error
from jax_fp8.bench.peaks import Readers
from jax_fp8.bench.timing import Timed, compiled
from jax_fp8.formats import E4M3FN, E8M0
from jax_fp8.quantize import quantize
from jax_fp8.quantize_primitive import quantize_two_axes

__all__ = ["QUANTIZE", "xla_quantize"]

#: Normal data in E4M3 is 2.6 to 2.7 % off; a quantiser outside of these bounds does something else.
_ERROR_BOUNDS: Final = (0.02, 0.035)


class _Scheme(NamedTuple):
    """Tiles of one or two copies, and whether scales are E8M0."""

    tiles: tuple[tuple[int, int], ...]
    mx: bool = False


_SCHEMES: Final[dict[str, _Scheme]] = {
    "tensor": _Scheme(((-1, -1),)),
    "row": _Scheme(((1, -1),)),
    "1x128": _Scheme(((1, 128),)),
    "128x128": _Scheme(((128, 128),)),
    "MX 1x32": _Scheme(((1, 32),), mx=True),
    "1x128 and 128x1": _Scheme(((1, 128), (128, 1))),
}


def xla_quantize(x: jax.Array, tile: tuple[int, int], *, mx: bool = False) -> ScaledArray:
    """The quantiser in jnp, as one would write it for speed: XLA compiles it.

    amax → scale = max(amax / 448, 2^-126), 1 where it is 0; for MX rounded up to a power of two;
    values = x / scale, which cannot saturate. Unlike ours it lets an infinity into the scale.

    Args:
      x: (rows, cols) array; the tile divides it.
      tile: (rows, cols) of one scale, -1 for a whole dim.
      mx: E8M0 scales.

    >>> xla_quantize(jnp.ones((2, 4)), (1, -1)).dequantize().tolist()[0]
    [1.0, 1.0, 1.0, 1.0]
    """
    rows, cols = (size if t == -1 else t for t, size in zip(tile, x.shape, strict=True))
    tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)
    amax = jnp.max(jnp.abs(tiles), axis=(1, 3), keepdims=True)
    scale = jnp.where(amax == 0, 1.0, jnp.maximum(amax / E4M3FN.max, 2.0**-126))
    if mx:
        scale = jnp.exp2(jnp.ceil(jnp.log2(scale)))
    values = (tiles / scale).reshape(x.shape).astype(E4M3FN.dtype)
    flat = scale.reshape(scale.shape[0], scale.shape[2])
    return ScaledArray(values, flat.astype(E8M0) if mx else flat, (rows, cols))


def _ours(x: jax.Array, scheme: _Scheme) -> tuple[ScaledArray, ...]:
    if len(scheme.tiles) == 2:
        execution = config.without_sums("bench")
        v0, s0, v1, s1 = quantize_two_axes(
            x, E4M3FN, (scheme.tiles[0], scheme.tiles[1]), execution, power_of_two=False
        )
        return ScaledArray(v0, s0, scheme.tiles[0]), ScaledArray(v1, s1, scheme.tiles[1])
    scale_dtype = E8M0 if scheme.mx else np.float32
    return (quantize(x, E4M3FN, scheme.tiles[0], scale_dtype=scale_dtype),)


def _theirs(x: jax.Array, scheme: _Scheme) -> tuple[ScaledArray, ...]:
    return tuple(xla_quantize(x, tile, mx=scheme.mx) for tile in scheme.tiles)


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    for rows, _, cols in shapes:
        inputs = Inputs(rows, cols, options.seed)
        x = inputs.real("f32")
        readers = Readers(x.nbytes, x.nbytes, options.threads)
        contender = functools.partial(_contender, inputs=inputs)
        for name, scheme in _SCHEMES.items():
            if any(
                size % t for tile in scheme.tiles for t, size in zip(tile, x.shape, strict=True)
            ):
                cut.append(f"quantize {name} of {rows} x {cols}: its tiles do not divide it")
                continue
            with forced(options):
                call = compiled(functools.partial(_ours, scheme=scheme), x)
            contenders = [
                Contender(
                    name="read as many bytes",
                    group=READ,
                    kind="machine",
                    timed=Timed(readers.read, own_clock=True),
                    counted_bytes=readers.piece_bytes,
                    peak=READ,
                ),
                contender(name, name, call, kind="ours", kernel=_kernel(options)),
            ]
            if "xla" in options.peers:
                theirs = compiled(functools.partial(_theirs, scheme=scheme), x)
                contenders.append(contender(f"XLA {name}", "XLA", theirs, kind="peer"))
            yield Case(
                name=f"{name}, {rows} x {cols} f32",
                shape=(rows, 1, cols),
                contenders=contenders,
                rate="GB/s",
            )
        readers.close()


def _contender(
    name: str, group: str, call: Callable[..., Any], *, inputs: Inputs, **more: Any
) -> Contender:
    x = inputs.real("f32")
    timed = functools.partial(call, x)
    return Contender(
        name=name,
        group=group,
        timed=Timed(timed),
        check=lambda: _check(timed(), inputs.array),
        counted_bytes=x.nbytes,
        moved_bytes=x.nbytes + sum(leaf.nbytes for leaf in jax.tree.leaves(timed())),
        peak=READ,
        **more,
    )


def _check(found: tuple[ScaledArray, ...], x: np.ndarray[Any, Any]) -> str:
    sample = np.unique(np.linspace(0, x.shape[0] - 1, 32).astype(int))
    for q in found:
        error = relative_error(float64_of(q, sample), x[sample].astype(np.float64))
        if not _ERROR_BOUNDS[0] <= error <= _ERROR_BOUNDS[1]:
            low, high = _ERROR_BOUNDS
            return (
                f"codes of the tile {q.tile} are {error:.2%} off, expected {low:.0%} to {high:.1%}"
            )
    return ""


def _kernel(options: Options) -> str:
    rows = [row for row in lowering.kernel_table() if row.operation == "quantize"]
    names = [row.name for row in rows if not row.why_not]
    return options.kernel if options.kernel in {row.name for row in rows} else names[0]


QUANTIZE: Final = Preset(
    title="float32 to E4M3",
    shapes=[(4096, 1, 4096)],
    cases_per_shape=len(_SCHEMES),
    shape_means="ROWS,1,COLUMNS",
    cases=_cases,
    notes=(
        "GB/s of float32 read, each element counted once, also where two copies are made of it; "
        "the share is of reading as many bytes and writing none",
        "XLA: the formula in jnp (amax, divide, cast), jitted as a whole",
    ),
)
