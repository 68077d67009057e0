"""A user's function as one of flat arguments with names, differentiated if it is a loss."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8 import formats
from jax_fp8.diagnosis.names import argument_name

__all__ = ["named_leaves", "program"]


def program(
    fn: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], has_aux: bool
) -> tuple[list[Any], list[str], Callable[..., Any], bool]:
    """Leaves of the arguments, their names, the function of them to run, and if it has gradients.

    NOTE: the function gets new containers at each call, so that modules that change their own state
    do not keep tracers.
    """
    leaves, names, tree = named_leaves(fn, args)
    with_paths = jax.tree_util.tree_leaves_with_path(tuple(args))

    def loss(*leaves: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, leaves))

    out = jax.eval_shape(loss, *leaves)
    value = out[0] if has_aux else out
    scalar = hasattr(value, "shape") and value.shape == () and _is_float(value)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    chosen = tuple(i % len(args) for i in chosen) if args else ()
    moving = [
        i for i, (path, _) in enumerate(with_paths)
        if path[0].idx in chosen and _is_float(leaves[i])
    ]  # fmt: skip
    if not scalar or not moving:
        return leaves, names, loss, False
    return leaves, names, jax.value_and_grad(loss, argnums=moving, has_aux=has_aux), True


def named_leaves(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[list[Any], list[str], Any]:
    """Leaves of the arguments as arrays, a name for each, and the structure of them all."""
    with_paths, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    leaves = [jnp.asarray(leaf) for _, leaf in with_paths]
    parameters = _parameter_names(fn, len(args))
    names = [argument_name(p).partition(".")[2] or parameters[p[0].idx] for p, _ in with_paths]
    return leaves, names, tree


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional parameters, arg0, arg1, … where they have none."""
    names = [f"arg{i}" for i in range(count)]
    with contextlib.suppress(TypeError, ValueError):
        for i, (name, parameter) in enumerate(inspect.signature(fn).parameters.items()):
            if i < count and parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            ):
                names[i] = name
    return names


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating)) and formats.from_dtype(x.dtype) is None
