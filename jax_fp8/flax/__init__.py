"""Substitutions for Flax modules. Needs the extra `jax_fp8[flax]`."""

import importlib
from typing import Any

__all__ = ["linen", "nnx"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"jax_fp8.flax.{name}")
    raise AttributeError(f"module 'jax_fp8.flax' has no attribute {name!r}")
