"""Evaluates a jaxpr again and taps what enters every `quantize_p` and `gemm_p` on the way.

Values travel as `Tracked`: beside an array of FP8 codes goes its shadow, the high-precision array
that it was rounded from, through the same reshapes and transposes, and where it came from. So a
GEMM's operands are known at the GEMM, even if they were quantised in another loop. Loops, branches
and remat are rebuilt with more outputs; everything is traceable, so it all runs under one jit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jax_fp8 import linear
from jax_fp8.diagnosis.names import clean_stack
from jax_fp8.gemm import gemm_p
from jax_fp8.linear import gradient_p, sides_of, tangent_p
from jax_fp8.panels import from_panels
from jax_fp8.prepared_dot import DGRAD_SCOPE
from jax_fp8.quantize_primitive import quantize_p

__all__ = ["GRADIENT", "Interpreter", "Tapped", "Tracked"]

Key = tuple[int, ...]

#: `Tracked.path` of a cotangent that a derivative rule quantises.
GRADIENT: Final = "<gradient>"

#: Primitives that move elements but do not change them. Their first operand is what they move.
_LAYOUT: Final = frozenset(
    {
        "broadcast_in_dim", "copy", "copy_p", "dynamic_slice", "expand_dims", "name", "pvary",
        "pcast", "reshape", "rev", "sharding_constraint", "slice", "squeeze", "stop_gradient",
        "transpose",
    }
)  # fmt: skip
#: Primitives whose result is still the argument that their operand was.
_CONVERSIONS: Final = ("convert_element_type", "bitcast_convert_type")
#: Calls that are evaluated in place: the parameter that holds their jaxpr.
_INLINED: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_INLINED_PRIMITIVES: Final = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
     "custom_vjp_call_jaxpr", "custom_lin"}
)  # fmt: skip
_REMAT: Final = frozenset({"remat", "remat2", "checkpoint"})
_SEEN: Final = (quantize_p, gemm_p, gradient_p, tangent_p)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tracked:
    """An array on its way through the program.

    Attributes:
      value: the array.
      shadow: for FP8 codes, the array that they were rounded from, in the same layout.
      origin: key of the `quantize_p` that made the codes, and which of its copies they are.
      path: name of the argument that this is, perhaps reshaped or converted.
    """

    value: Any
    shadow: Any = None
    origin: tuple[Key, int] | None = dataclasses.field(default=None, metadata={"static": True})
    path: str = dataclasses.field(default="", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tapped:
    """What one primitive was given, and what it gave.

    Attributes:
      arrays: what the tap keeps, by name.
      ran: whether it ran: a branch not taken leaves zeros.
      primitive: "gemm" or "quantize".
      params: parameters of the primitive.
      scope: name stack, without what transformations add.
      direction: "forward", "dgrad", "wgrad" or, in forward mode, "tangent".
      recomputed: whether it is the second run of a forward pass, by remat.
      paths: name of the argument that each operand is, or "".
      origins: `Tracked.origin` of each operand.
      lengths: lengths of the loops around it; each is a leading dim of the arrays.
    """

    arrays: dict[str, Any]
    ran: Any
    primitive: str = dataclasses.field(metadata={"static": True})
    params: tuple[tuple[str, Any], ...] = dataclasses.field(metadata={"static": True})
    scope: str = dataclasses.field(metadata={"static": True})
    direction: str = dataclasses.field(metadata={"static": True})
    recomputed: bool = dataclasses.field(metadata={"static": True})
    paths: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    origins: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    lengths: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})


Taps = dict[Key, Tapped]
Keep = Callable[[str, list[Tracked], list[Any], dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an equation stands."""

    key: Key = ()
    scope: str = ""
    directions: tuple[str, ...] = ("forward",)


class Interpreter:
    """Evaluates jaxprs and collects taps.

    Args:
      keep: what to keep of a primitive: gets its name ("gemm" or "quantize"), operands, results and
        parameters, returns arrays by name.
      shadows: whether to carry high-precision shadows of codes, which costs their memory.

    Attributes:
      roles: role of what each `quantize_p` quantised, where a derivative rule tells it.
      unseen: names of primitives that hold FP8 GEMMs and cannot be looked into.
    """

    def __init__(self, keep: Keep, *, shadows: bool = True) -> None:
        self._keep, self._shadows = keep, shadows
        self.roles: dict[Key, str] = {}
        self.unseen: set[str] = set()

    def evaluate(
        self, closed: ClosedJaxpr, arguments: Sequence[Tracked], place: _Place | None = None
    ) -> tuple[list[Tracked], Taps]:
        """Results and taps of a closed jaxpr."""
        return self._evaluate(closed.jaxpr, closed.consts, arguments, place or _Place())

    def _evaluate(
        self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        environment: dict[Any, Tracked] = {}
        environment.update(zip(jaxpr.constvars, map(Tracked, consts), strict=True))
        environment.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Tracked:
            return Tracked(atom.val) if isinstance(atom, Literal) else environment[atom]

        taps: Taps = {}
        directions = list(place.directions)
        for index, equation in enumerate(jaxpr.eqns):
            stack = str(equation.source_info.name_stack)
            scope = "/".join(part for part in (place.scope, stack) if part)
            own = _Place((*place.key, index), scope, tuple(directions))
            if equation.primitive is gemm_p and len(directions) > 1:
                own = dataclasses.replace(own, directions=(directions.pop(0),))
            out, found = self._equation(equation, [read(x) for x in equation.invars], own)
            taps |= found
            environment.update(zip(equation.outvars, out, strict=True))
        return [read(x) for x in jaxpr.outvars], taps

    def _equation(
        self, equation: Any, operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        primitive, params = equation.primitive, equation.params
        if primitive in (gemm_p, quantize_p):
            return self._tap(equation, operands, place)
        if primitive in (gradient_p, tangent_p):
            return self._derivative(primitive, params, operands, place)
        if not any(_holds_fp8(inner) for inner in _jaxprs(params)):
            return self._plain(equation, operands), {}
        name = primitive.name
        if name in _INLINED_PRIMITIVES:
            inner = next(params[key] for key in _INLINED if key in params)
            return self._evaluate(*_open(inner), operands, place)
        if name in _REMAT:
            return self._remat(equation, operands, place)
        if name == "scan":
            return self._scan(params, operands, place)
        if name == "cond":
            return self._cond(params, operands, place)
        self.unseen.add(name)
        return self._plain(equation, operands), {}

    def _plain(self, equation: Any, operands: list[Tracked]) -> list[Tracked]:
        primitive, params = equation.primitive, equation.params
        values, name = [x.value for x in operands], primitive.name
        if any(True for _ in _jaxprs(params)):
            return list(map(Tracked, _run_alone(equation, values)))
        out = primitive.bind(*values, **params)
        results = list(out) if primitive.multiple_results else [out]
        if name == "optimization_barrier":
            return [dataclasses.replace(x, value=y) for x, y in zip(operands, results, strict=True)]
        if not operands or name not in {*_CONVERSIONS, *_LAYOUT, "pad"}:
            return list(map(Tracked, results))
        moved, shadow = operands[0], None
        if moved.shadow is not None and name in {*_LAYOUT, "pad"}:
            fill = [jnp.zeros((), moved.shadow.dtype)] if name == "pad" else values[1:]
            shadow = primitive.bind(moved.shadow, *fill, **params)
        origin = moved.origin if name != "convert_element_type" else None
        return [Tracked(results[0], shadow, origin, moved.path)]

    def _tap(
        self, equation: Any, operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        primitive, params = equation.primitive, equation.params
        direction = place.directions[0]
        if DGRAD_SCOPE in place.scope:  # the derivative rule of prepared weights
            direction = "dgrad"
            if primitive is quantize_p:
                operands = [dataclasses.replace(operands[0], path=GRADIENT), *operands[1:]]
        values = [x.value for x in operands]
        out = primitive.bind(*values, **params)
        results = list(out) if primitive.multiple_results else [out]
        name = "gemm" if primitive is gemm_p else "quantize"
        if primitive is gemm_p and params["rhs_n"] is not None:  # show the weights as a matrix
            rhs = dataclasses.replace(operands[1], value=from_panels(values[1], params["rhs_n"]))
            operands = [operands[0], rhs, *operands[2:]]
        tapped = Tapped(
            arrays=self._keep(name, operands, results, params),
            ran=np.True_,
            primitive=name,
            params=tuple(sorted(params.items())),
            scope=clean_stack(place.scope),
            direction=direction,
            recomputed="rematted_computation" in place.scope,
            paths=tuple(x.path for x in operands),
            origins=tuple(x.origin for x in operands),
        )
        if primitive is gemm_p:
            return [Tracked(results[0])], {place.key: tapped}
        shadow = operands[0].value if self._shadows else None
        path, computed = operands[0].path, len(results) > 1
        tracked = []
        for i, result in enumerate(results):
            is_codes = not computed or i % 2 == 0
            origin = (place.key, i // 2)
            tracked.append(Tracked(result, shadow if is_codes else None, origin, path))
        return tracked, {place.key: tapped}

    def _derivative(
        self, primitive: Any, params: dict[str, Any], operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        """Evaluates what the library's own primitives are lowered to."""
        contraction, wrt = params["contraction"], params["wrt"]
        split = linear._split(contraction, wrt, operands)
        if primitive is gradient_p:
            operands = [dataclasses.replace(operands[0], path=GRADIENT), *operands[1:]]
        for s, residual in zip(sides_of(wrt), split.residuals, strict=True):
            if residual.copy and residual.copy[0].origin:
                self.roles[residual.copy[0].origin[0]] = contraction.roles[1 - s]
        directions = tuple(
            "wgrad" if contraction.roles[s] == "weight" else "dgrad"
            for s in sides_of(wrt)
            if contraction.is_fp8_gradient(s)
        )
        is_gradient = primitive is gradient_p
        impl = linear._gradient_impl if is_gradient else linear._tangent_impl
        closed = jax.make_jaxpr(functools.partial(impl, **params))(*(x.value for x in operands))
        # The last direction stays, so that one is left for quantisers behind the last GEMM.
        inner = (*directions, "backward") if is_gradient else ("tangent",)
        return self.evaluate(closed, operands, dataclasses.replace(place, directions=inner))

    def _remat(
        self, equation: Any, operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        """The same remat with more results: inlining it would let XLA keep what it recomputes."""
        inner = equation.params["jaxpr"]

        def body(operands: list[Tracked]) -> tuple[list[Tracked], Taps]:
            return self._evaluate(*_open(inner), operands, place)

        closed, shape = jax.make_jaxpr(body, return_shape=True)(operands)
        params = dict(equation.params)
        if isinstance(inner, ClosedJaxpr):
            params["jaxpr"], consts = closed, []
        else:  # an open jaxpr takes what it closes over as operands
            params["jaxpr"], consts = closed.jaxpr, list(closed.consts)
            if consts:
                return body(operands)
        flat = equation.primitive.bind(*consts, *jax.tree.leaves(operands), **params)
        out: tuple[list[Tracked], Taps] = jax.tree.unflatten(jax.tree.structure(shape), flat)
        return out

    def _scan(
        self, params: dict[str, Any], operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts = operands[:num_consts]
        carry = [x.value for x in operands[num_consts : num_consts + num_carry]]
        xs = operands[num_consts + num_carry :]

        def body(carry: list[Any], xs: list[Tracked]) -> Any:
            arguments = [*consts, *map(Tracked, carry), *xs]
            out, taps = self._evaluate(*_open(params["jaxpr"]), arguments, place)
            return [x.value for x in out[:num_carry]], (out[num_carry:], taps)

        final, (ys, taps) = jax.lax.scan(
            body,
            carry,
            xs,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        stacked = {
            key: dataclasses.replace(tap, lengths=(params["length"], *tap.lengths))
            for key, tap in taps.items()
        }
        return [*map(Tracked, final), *ys], stacked

    def _cond(
        self, params: dict[str, Any], operands: list[Tracked], place: _Place
    ) -> tuple[list[Tracked], Taps]:
        index, *arguments = operands

        def branch(number: int) -> Callable[[list[Tracked]], Any]:
            own = dataclasses.replace(place, key=(*place.key, number))
            return lambda arguments: self._evaluate(
                *_open(params["branches"][number]), arguments, own
            )

        functions = [branch(i) for i in range(len(params["branches"]))]
        shapes = [jax.eval_shape(f, arguments) for f in functions]
        every: Taps = functools.reduce(lambda a, b: a | b, (taps for _, taps in shapes))
        common = [_common(outs) for outs in zip(*(out for out, _ in shapes), strict=True)]

        def padded(function: Callable[[list[Tracked]], Any]) -> Callable[[list[Tracked]], Any]:
            def run(arguments: list[Tracked]) -> tuple[list[Tracked], Taps]:
                out, taps = function(arguments)
                missing = {key: _zeros(tap) for key, tap in every.items() if key not in taps}
                alike = [
                    dataclasses.replace(model, value=x.value, shadow=_or_zeros(x.shadow, model))
                    for x, model in zip(out, common, strict=True)
                ]
                return alike, taps | missing

            return run

        out: tuple[list[Tracked], Taps] = jax.lax.switch(
            index.value, [padded(f) for f in functions], arguments
        )
        return out


def _run_alone(equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates an equation that holds jaxprs, whatever its way of binding them."""
    given = {
        atom: value
        for atom, value in zip(equation.invars, values, strict=True)
        if not isinstance(atom, Literal)
    }
    debug_info = _open(next(_jaxprs(equation.params)))[0].debug_info  # jax wants some
    jaxpr = Jaxpr((), list(given), equation.outvars, [equation], debug_info=debug_info)
    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*given.values()))


def _common(outs: Sequence[Tracked]) -> Tracked:
    """What is known of a result of branches: from the first that knows where it comes from."""
    return next((x for x in outs if x.shadow is not None or x.origin), outs[0])


def _or_zeros(shadow: Any, model: Tracked) -> Any:
    if model.shadow is None:
        return None
    if shadow is not None and shadow.shape == model.shadow.shape:
        return shadow.astype(model.shadow.dtype)
    return jnp.zeros(model.shadow.shape, model.shadow.dtype)


def _zeros(tap: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tap)


def _open(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield item


def _holds_fp8(jaxpr: Any) -> bool:
    """Whether FP8 primitives stand anywhere in a jaxpr."""
    return any(
        equation.primitive in _SEEN or any(map(_holds_fp8, _jaxprs(equation.params)))
        for equation in _open(jaxpr)[0].eqns
    )
