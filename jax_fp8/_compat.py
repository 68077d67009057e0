"""The one place for what differs between JAX releases or has no public name in all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import AxisType

Array = jax.Array


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which `x` (array or abstract value) varies inside `shard_map`."""
    aval = x if hasattr(x, "str_short") else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def _mark_varying(x: Array, axes: frozenset[str]) -> Array:
    names = tuple(sorted(axes))
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, names, to="varying")
    return jax.lax.pvary(x, names)  # type: ignore[attr-defined,unused-ignore]  # jax < 0.9


def equalize_varying_axes(*operands: Array) -> tuple[Array, ...]:
    """Casts operands to vary over the union of their axes, as JAX's own binary operations do."""
    union = frozenset[str]().union(*(varying_axes(x) for x in operands))
    return tuple(
        x if varying_axes(x) == union else _mark_varying(x, union - varying_axes(x))
        for x in operands
    )


def explicit_axes(x: Any) -> tuple[tuple[int, str], ...]:
    """(dim, mesh axis) for each dim of `x` that is sharded over an Explicit mesh axis."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    spec = getattr(sharding, "spec", None)
    if sharding is None or spec is None:
        return ()
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))

    def names(entry: Any) -> Iterable[str]:
        return () if entry is None else (entry,) if isinstance(entry, str) else entry

    return tuple(
        (dim, name)
        for dim, entry in enumerate(spec)
        for name in names(entry)
        if types.get(name) == AxisType.Explicit
    )


def key_data(key: Array) -> Array:
    """uint32 data of a typed key or of a raw one."""
    return jax.random.key_data(key) if _is_typed(key) else key


def key_impl(key: Array) -> str:
    """Name of a key's generator; a raw key has JAX's default one."""
    if _is_typed(key):
        return str(jax.random.key_impl(key))
    return str(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined,unused-ignore]


def _is_typed(key: Array) -> bool:
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def enable_x64() -> AbstractContextManager[Any]:
    """A context with 64-bit types."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # type: ignore[attr-defined,unused-ignore]  # older ones


def zero_tangent(x: Any) -> Any:
    """The symbolic zero tangent of a primal value."""
    return ad.Zero.from_primal_value(x)  # type: ignore[attr-defined,unused-ignore]


def runtime_ffi_api_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI API that the installed jaxlib offers.

    jaxlib has no function for it, but ships the headers that define it.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8")
    major, minor = (
        int(match.group(1))
        for name in ("MAJOR", "MINOR")
        if (match := re.search(rf"#define XLA_FFI_API_{name} (\d+)", text))
    )
    return major, minor
