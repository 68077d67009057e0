"""Names of layers, from name stacks and from the arguments that weights are."""

from __future__ import annotations

import re
from typing import Any

import jax

__all__ = ["argument_name", "clean_stack", "layer_of_path"]

#: What transformations put round a part of a name stack: `transpose(jvp(Model))`.
_WRAPPED = re.compile(r"[\w.]+\(([^()]*)\)")
#: Parts that name a mechanism, not a layer.
_MECHANISMS = re.compile(
    r"rematted_computation|checkpoint|remat|while|body|cond|scan|branch_\d+_fun"
    r"|\w*DotGeneral(_\d+)?(\.\w+)?|EinsumOp(_\d+)?|closed_call|core_call|fp8_dgrad|\s*"
)
#: Last parts of a path that name a weight within its layer, in the order in which they come off.
_LEAVES = (re.compile(r"values?|raw_value"), re.compile(r"kernel|weight|w|embedding|bias"))


def clean_stack(stack: str) -> str:
    """A name stack without what transformations and this library add.

    >>> clean_stack("transpose(jvp(Model))/Dense_0/DotGeneral_0.dot_general")
    'Model/Dense_0'
    >>> clean_stack("jvp()/block/block/rematted_computation")
    'block'
    """
    while (shorter := _WRAPPED.sub(r"\1", stack)) != stack:
        stack = shorter
    parts = [part for part in stack.split("/") if not _MECHANISMS.fullmatch(part)]
    # Inside remat and scan the outer scopes are named again.
    start = 0
    while start < len(parts):
        for size in range((len(parts) - start) // 2, 0, -1):
            if parts[start : start + size] == parts[start + size : start + 2 * size]:
                del parts[start : start + size]
                break
        else:
            start += 1
    return "/".join(parts)


def argument_name(path: Any) -> str:
    """Name of a leaf of the arguments: `['params']['up']['kernel']` becomes params.up.kernel.

    >>> argument_name(jax.tree_util.tree_leaves_with_path({"up": [1, 2]})[1][0])
    'up.1'
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def layer_of_path(path: str) -> str:
    """Layer that a weight belongs to.

    >>> layer_of_path("params.Block_0.up.kernel"), layer_of_path("w")
    ('Block_0.up', 'w')
    >>> layer_of_path("up.values")  # of a ScaledArray or a PreparedArray
    'up'
    >>> layer_of_path("attention.value.kernel.value")
    'attention.value'
    """
    parts = path.split(".")
    if parts[0] == "params":
        del parts[0]
    for leaf in _LEAVES:
        if len(parts) > 1 and leaf.fullmatch(parts[-1]):
            del parts[-1]
    return ".".join(parts) or path
