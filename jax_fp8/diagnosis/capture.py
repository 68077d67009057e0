"""Every FP8 GEMM of a function and of its gradients, with what its operands were rounded from.

`capture` evaluates the function once, jitted, and hands out NumPy arrays: a `Gemm` for each GEMM
that ran, in each iteration of a loop, with two `Operand`s as matrices (batch, rows, k).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
import numpy.typing as npt

from jax_fp8 import formats
from jax_fp8.config import Execution
from jax_fp8.diagnosis.interpreter import GRADIENT, Interpreter, Key, Tapped, Tracked
from jax_fp8.diagnosis.names import clean_stack, layer_of_path
from jax_fp8.diagnosis.program import program
from jax_fp8.formats import Format

__all__ = ["LETTERS", "Captured", "Gemm", "Operand", "capture", "name_layers", "roles_of"]

Array = npt.NDArray[Any]

#: Iterations of a loop that are kept, spread evenly over it, the first and the last among them.
MAX_ITERATIONS: Final = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
    """One quantised operand of a GEMM.

    Attributes:
      layer: layer that it belongs to.
      role: "input", "weight" or "gradient".
      directions: GEMMs that take these codes: "forward", "dgrad", "wgrad".
      codes: FP8 (batch, rows, k).
      scale: float32 (batch, ceil(rows / tile_rows), ceil(k / tile_k)), the dequantising factor.
      tile: rows and k that one scale covers.
      exact: float32 (batch, rows, k) that the codes were rounded from, None where unknown.
      given_scale: whether the scale was an argument instead of computed from amax.
      path: name of the argument that it is, or "".
    """

    layer: str
    role: str
    directions: tuple[str, ...]
    codes: Array
    scale: Array
    tile: tuple[int, int]
    exact: Array | None
    given_scale: bool
    path: str

    @property
    def format(self) -> Format:
        """Format of the codes."""
        return formats.lookup(self.codes.dtype)

    @property
    def name(self) -> str:
        """Layer, role letter and directions: "up x (forward)"."""
        return f"{self.layer} {LETTERS[self.role]} ({', '.join(self.directions)})"


#: Short names of roles: x · w forward, g the gradient of their product.
LETTERS: Final = {"input": "x", "weight": "w", "gradient": "g"}


@dataclasses.dataclass(frozen=True, eq=False)
class Gemm:
    """One FP8 GEMM that ran: out[b, m, n] = sum over k of lhs[b, m, k] · rhs[b, n, k].

    Attributes:
      layer: name from the name stack, from the path of its weight, or a number.
      direction: "forward", "dgrad" (gradient of an input), "wgrad" (of a weight), "tangent".
      lhs: (batch or 1, m, k).
      rhs: (batch or 1, n, k).
      out: result as the program got it, (batch, m, n).
      execution: kernel and accumulation.
      recomputed: whether remat ran it a second time.
    """

    layer: str
    direction: str
    lhs: Operand
    rhs: Operand
    out: Array
    execution: Execution
    recomputed: bool

    @property
    def k(self) -> int:
        """Products of each sum."""
        return int(self.lhs.codes.shape[-1])

    @property
    def name(self) -> str:
        return f"{self.layer} {self.direction}"


@dataclasses.dataclass(frozen=True)
class Captured:
    """What a function multiplied in FP8.

    Attributes:
      gemms: in the order of the program; those that remat ran again are left out.
      loose: quantised tensors that no GEMM took.
      notices: sentences about what could not be seen.
      differentiated: whether the gradients of the function are among the GEMMs.
    """

    gemms: tuple[Gemm, ...]
    loose: tuple[Operand, ...]
    notices: tuple[str, ...]
    differentiated: bool


def capture(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    recomputed: bool = False,
) -> Captured:
    """Runs `value_and_grad(fn)`, or `fn` itself if it is no scalar, and keeps what FP8 GEMMs got.

    Args:
      fn: a loss, or any function that jax can trace: a whole training step, `jax.grad` of a loss.
      *args: its arguments, pytrees of arrays.
      argnums: arguments to differentiate, as for `jax.grad`; leaves that are not floats are left
        out.
      has_aux: whether fn returns (loss, anything).
      recomputed: keep GEMMs that remat ran a second time, too.

    Returns:
      Arrays of every GEMM, all operands in memory at once.

    >>> import jax.numpy as jnp, jax_fp8 as fp8
    >>> found = capture(lambda w, x: fp8.matmul(x, w["up"]).sum(), {"up": jnp.ones((8, 4))},
    ...                 jnp.ones((2, 8)))
    >>> [gemm.name for gemm in found.gemms]
    ['up forward', 'up wgrad']
    """
    leaves, names, run, differentiated = program(fn, args, argnums, has_aux)
    interpreter = Interpreter(_keep)
    closed = jax.make_jaxpr(run)(*leaves)

    def tapped(leaves: list[Any]) -> dict[Key, Tapped]:
        operands = [Tracked(x, path=name) for x, name in zip(leaves, names, strict=True)]
        taps = interpreter.evaluate(closed, operands)[1]
        consumed = {
            origin[0] for tap in taps.values() if tap.primitive == "gemm" for origin in tap.origins
            if origin is not None
        }  # fmt: skip
        return {
            key: dataclasses.replace(tap, arrays={}) if key in consumed else tap
            for key, tap in taps.items()
        }

    taps = jax.device_get(jax.jit(tapped)(leaves))
    return _collect(taps, interpreter, differentiated, recomputed)


def _keep(
    name: str, operands: list[Tracked], results: list[Any], params: dict[str, Any]
) -> dict[str, Any]:
    if name == "quantize":
        given = {"scale0": operands[1].value} if len(results) == 1 else {}
        made = {f"{'scale' if i % 2 else 'codes'}{i // 2}": y for i, y in enumerate(results)}
        return {"exact": operands[0].value, **made, **given}
    sides = {"lhs": operands[0], "rhs": operands[1]}
    scales = {"lhs_scale": operands[2].value, "rhs_scale": operands[3].value}
    exact = {f"{side}_exact": x.shadow for side, x in sides.items() if x.shadow is not None}
    return {side: x.value for side, x in sides.items()} | scales | exact | {"out": results[0]}


# --- From taps to GEMMs ---------------------------------------------------------------------------


def _collect(
    taps: dict[Key, Tapped], interpreter: Interpreter, differentiated: bool, recomputed: bool
) -> Captured:
    gemms = {key: tap for key, tap in sorted(taps.items()) if tap.primitive == "gemm"}
    layers = name_layers(gemms)
    roles = {key: roles_of(tap, interpreter.roles) for key, tap in gemms.items()}
    users: dict[Any, list[str]] = {}
    for tap in gemms.values():
        for origin in tap.origins[:2]:
            if origin is not None and tap.direction not in users.setdefault(origin, []):
                users[origin].append(tap.direction)
    found, notices = [], []
    for key, tap in gemms.items():
        if tap.recomputed and not recomputed:
            continue
        for index in _iterations(tap):
            found.append(_gemm(tap, index, layers[key], roles[key], users, taps))
        if (length := int(np.prod(tap.lengths))) > MAX_ITERATIONS:
            name = f"{layers[key]} {tap.direction}"
            notices.append(f"{name}: {MAX_ITERATIONS} of {length} iterations were looked at")
    loose = [
        operand
        for number, tap in enumerate(t for _, t in sorted(taps.items()) if t.primitive != "gemm")
        if tap.arrays
        for index in _iterations(tap)
        for operand in _loose(tap, index, tap.scope or layer_of_path(tap.paths[0]) or f"#{number}")
    ]
    notices += [
        f"FP8 GEMMs inside {name} were not seen: diagnose the function within it"
        for name in sorted(interpreter.unseen)
    ]
    return Captured(tuple(found), tuple(loose), tuple(dict.fromkeys(notices)), differentiated)


def name_layers(gemms: dict[Key, Tapped]) -> dict[Key, str]:
    """A layer for each GEMM: from scope and weight, for gradients from the codes they share."""
    layers: dict[Key, str] = {}
    by_call: dict[Key, str] = {}
    by_path: dict[str, set[str]] = {}
    for again in (False, True):  # what remat runs again gets the same names as the first run
        group = [
            (key, tap) for key, tap in gemms.items()
            if tap.recomputed == again and tap.direction in ("forward", "tangent")
        ]  # fmt: skip
        stems = [tap.scope or _weight_layer(tap) or "gemm" for _, tap in group]
        several = {stem for stem, count in Counter(stems).items() if count > 1}
        paths = [
            f"{stem}/{layer}" if stem in several and tap.scope and (layer := _weight_layer(tap))
            else stem
            for stem, (_, tap) in zip(stems, group, strict=True)
        ]  # fmt: skip
        counts, numbers = Counter(paths), Counter[str]()
        for path, (key, tap) in zip(paths, group, strict=True):
            numbers[path] += 1
            unique = path if counts[path] == 1 else f"{path}#{numbers[path]}"
            layers[key] = unique
            for origin, operand_path in zip(tap.origins[:2], tap.paths[:2], strict=True):
                if origin is not None:
                    by_call.setdefault(origin[0], unique)
                if operand_path:
                    by_path.setdefault(operand_path, set()).add(unique)
    for key, tap in gemms.items():
        if key not in layers:
            linked = [by_call[o[0]] for o in tap.origins[:2] if o is not None and o[0] in by_call]
            # Codes from a branch are linked to the first branch: the scope knows better.
            linked = [layer for layer in linked if _within(layer, tap)]
            # Operands that are quantised again are the same arguments as in one forward GEMM.
            users = [by_path[path] for path in tap.paths[:2] if path in by_path]
            linked += [next(iter(user)) for user in users if len(user) == 1]
            layers[key] = next(iter(linked), "") or tap.scope or _weight_layer(tap) or "gemm"
    return layers


def _within(layer: str, tap: Tapped) -> bool:
    """Whether a layer may be that of a GEMM, by the scope of the GEMM."""
    return (
        not tap.scope or layer == tap.scope or layer.startswith((f"{tap.scope}/", f"{tap.scope}#"))
    )


def _weight_layer(tap: Tapped) -> str:
    paths = [path for path in reversed(tap.paths[:2]) if path and path != GRADIENT]
    return layer_of_path(paths[0]) if paths else ""


def roles_of(tap: Tapped, known: dict[Key, str]) -> tuple[str, str]:
    """Roles of both operands. Without a derivative rule rhs counts as the weight."""
    if tap.direction in ("forward", "tangent"):
        defaults = ("input", "weight")
    else:
        other = "input" if tap.direction == "wgrad" else "weight"
        defaults = tuple("gradient" if p == GRADIENT else other for p in tap.paths[:2])  # type: ignore[assignment]
    lhs, rhs = (
        known.get(origin[0], default) if origin is not None else default
        for origin, default in zip(tap.origins[:2], defaults, strict=True)
    )
    return lhs, rhs


def _iterations(tap: Tapped) -> list[tuple[int, ...]]:
    """Indices of the iterations to keep, of those that ran."""
    indices = list(np.ndindex(*tap.lengths))
    if len(indices) > MAX_ITERATIONS:
        spread = np.linspace(0, len(indices) - 1, MAX_ITERATIONS).round().astype(int)
        indices = [indices[i] for i in spread]
    ran = np.asarray(tap.ran)
    return [index for index in indices if bool(ran[index])]


def _indexed(layer: str, index: tuple[int, ...]) -> str:
    return layer + "".join(f"[{i}]" for i in index)


def _gemm(
    tap: Tapped,
    index: tuple[int, ...],
    layer: str,
    roles: tuple[str, str],
    users: dict[Any, list[str]],
    taps: dict[Key, Tapped],
) -> Gemm:
    params, layer = dict(tap.params), _indexed(layer, index)
    operands = []
    for i, side in enumerate(("lhs", "rhs")):
        origin = tap.origins[i]
        maker = taps.get(origin[0]) if origin is not None else None
        tile: tuple[int, int] = params[f"{side}_tile"]
        arrays = [tap.arrays.get(f"{side}{part}") for part in ("", "_scale", "_exact")]
        codes, scale, exact = (
            None if y is None else _matrix(np.asarray(y)[index], params[f"{side}_axis"])
            for y in arrays
        )
        assert codes is not None
        assert scale is not None
        operands.append(
            Operand(
                layer=layer,
                role=roles[i],
                directions=tuple(users.get(origin, [tap.direction])),
                codes=codes,
                scale=scale,
                tile=(min(tile[0], max(codes.shape[1], 1)), min(tile[1], max(codes.shape[2], 1))),
                exact=None if exact is None else exact.astype(np.float32),
                given_scale=maker is None or scale_is_given(maker),
                path=tap.paths[i].replace(GRADIENT, ""),
            )
        )
    out = np.asarray(tap.arrays["out"])[index]
    return Gemm(
        layer=layer,
        direction=tap.direction,
        lhs=operands[0],
        rhs=operands[1],
        out=out.reshape(-1, *out.shape[-2:]).astype(np.float32),
        execution=params["execution"],
        recomputed=tap.recomputed,
    )


def scale_is_given(maker: Tapped) -> bool:
    stochastic = dict(maker.params)["rounding"] == "stochastic"
    return len(maker.paths) - stochastic == 2


def _matrix(x: Array, axis: int) -> Array:
    """(batch, rows, k) of an operand or scale whose k lies on `axis`."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if axis == -1 else np.swapaxes(x, -1, -2)


def _loose(tap: Tapped, index: tuple[int, ...], layer: str) -> list[Operand]:
    params = dict(tap.params)
    exact = np.asarray(tap.arrays["exact"])[index].astype(np.float32)
    return [
        Operand(
            layer=_indexed(clean_stack(layer), index),
            role="input",
            directions=("quantize",),
            codes=np.asarray(tap.arrays[f"codes{i}"])[index],
            scale=np.asarray(tap.arrays[f"scale{i}"])[index],
            tile=(min(tile[0], max(exact.shape[1], 1)), min(tile[1], max(exact.shape[2], 1))),
            exact=exact,
            given_scale=scale_is_given(tap),
            path=tap.paths[0].replace(GRADIENT, ""),
        )
        for i, tile in enumerate(params["tiles"])
    ]
