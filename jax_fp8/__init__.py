"""FP8 matrix multiplication for JAX: real kernels, scales as operands, gradients in E5M2.

>>> import jax.numpy as jnp, jax_fp8 as fp8
>>> x, w = jnp.array([[1.0, 0.3]]), jnp.array([[2.0], [1.0]])
>>> round(float(fp8.matmul(x, w)[0, 0]), 2)  # 0.3 has become 0.2857 in FP8
2.29
"""

import importlib
import importlib.util
from typing import Any

if importlib.util.find_spec("jax_fp8._ffi") is None:
    raise ImportError(
        f"jax_fp8 in {__path__[0]} lacks its compiled module _ffi: this is the source folder of a "
        "package that was not built. Install it with 'pip install .' and start Python in another "
        "folder, or with 'pip install -e .'"
    )

from jax_fp8 import emulation, formats
from jax_fp8.accumulation import PerGemm
from jax_fp8.array import ScaledArray
from jax_fp8.config import deterministic, emulate, force_kernel, require_kernel
from jax_fp8.dispatch import Explanation, explain
from jax_fp8.dot import dot_general, matmul
from jax_fp8.einsum import einsum
from jax_fp8.formats import E4M3FN, E5M2, Format
from jax_fp8.lowering import register
from jax_fp8.prepare import prepare
from jax_fp8.prepared import PreparedArray
from jax_fp8.quantize import dequantize, quantize
from jax_fp8.recipes import (
    BlockScaling,
    MXScaling,
    Recipe,
    RowScaling,
    StaticScaling,
    TensorScaling,
    TileScaling,
)
from jax_fp8.scaled import scaled_dot_general, scaled_matmul

__version__ = "0.1.0"

__all__ = [
    "E4M3FN",
    "E5M2",
    "BlockScaling",
    "Explanation",
    "Format",
    "MXScaling",
    "PerGemm",
    "PreparedArray",
    "Recipe",
    "RowScaling",
    "ScaledArray",
    "StaticScaling",
    "TensorScaling",
    "TileScaling",
    "dequantize",
    "deterministic",
    "dot_general",
    "einsum",
    "emulate",
    "emulation",
    "explain",
    "force_kernel",
    "formats",
    "matmul",
    "prepare",
    "quantize",
    "register",
    "require_kernel",
    "scaled_dot_general",
    "scaled_matmul",
]

#: Submodules that load when they are first used: they import packages that are extras.
_LAZY = ("diagnosis", "flax", "testing")
#: Functions of `jax_fp8.diagnosis`, which load with it.
_OF_DIAGNOSIS = ("diagnose", "watch")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"jax_fp8.{name}")
    if name in _OF_DIAGNOSIS:
        return getattr(importlib.import_module("jax_fp8.diagnosis"), name)
    raise AttributeError(f"module 'jax_fp8' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_LAZY, *_OF_DIAGNOSIS]
