"""Scales between float32 and E8M0, by integer operations: XLA may flush what is subnormal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8 import formats

__all__ = ["scale_to_e8m0", "scale_to_float32"]

Array = jax.Array


def scale_to_float32(scale: Array) -> Array:
    """float32 of a float32 or E8M0 scale, by integer operations.

    XLA may flush 2^-127, which E8M0 holds and which is subnormal in float32. Byte 255 is NaN.
    """
    if np.dtype(scale.dtype) != formats.E8M0:
        return scale
    byte = jax.lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(byte == 0, jnp.uint32(1 << 22), byte << 23)
    bits = jnp.where(byte == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_to_e8m0(scale: Array) -> Array:
    """E8M0 of positive float32 powers of two, by integer operations."""
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 23).astype(jnp.uint8), formats.E8M0)
