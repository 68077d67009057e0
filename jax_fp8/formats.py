"""The one table of 8-bit formats: what a code can hold, and where a quantiser saturates.

Facts are those of the OCP 8-bit Floating Point Specification (OFP8) 1.0 and the OCP Microscaling
Formats (MX) Specification 1.0; `ffi/common/fp8.h` is the same table for the kernels, and a test
holds the two equal.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["ALL", "E4M3FN", "E5M2", "E8M0", "Format", "FormatLike", "lookup"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One 8-bit floating-point format.

    Attributes:
      name: short name, as kernels spell it: "e4m3fn".
      dtype: NumPy dtype of its codes.
      mantissa_bits: stored mantissa bits.
      bias: exponent bias.
      max: largest finite value.
      has_inf: whether it has codes for infinity.
      aliases: other names that `lookup` takes.
    """

    name: str
    dtype: np.dtype[np.generic]
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool
    aliases: tuple[str, ...] = ()

    @property
    def smallest_normal(self) -> float:
        """Smallest normal magnitude, 2^(1 - bias)."""
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest nonzero magnitude."""
        return float(self.smallest_normal * 2.0**-self.mantissa_bits)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa_bits)

    @property
    def saturation_threshold(self) -> float:
        """Magnitude from which a value counts as saturated: 464 for E4M3FN, 61440 for E5M2.

        Half a unit in the last place above `max`. A saturating quantiser returns `max` on either
        side of it; counts and the mask of `ste="mask_saturated"` start here.
        """
        return float(self.max + 2.0 ** np.floor(np.log2(self.max)) * self.eps / 2)


E4M3FN = Format(
    name="e4m3fn",
    dtype=np.dtype(ml_dtypes.float8_e4m3fn),
    mantissa_bits=3,
    bias=7,
    max=448.0,
    has_inf=False,
    aliases=("e4m3", "float8_e4m3fn"),
)
E5M2 = Format(
    name="e5m2",
    dtype=np.dtype(ml_dtypes.float8_e5m2),
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    has_inf=True,
    aliases=("float8_e5m2",),
)
#: Formats of values. A new row here is a format that every test runs over.
ALL: tuple[Format, ...] = (E4M3FN, E5M2)

#: The formats of AMD CDNA3: the code of -0 is NaN, and the bias is one more. Only the emulation of
#: that machine takes them.
FNUZ_DTYPES = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz))

#: The scale format of MX: an exponent byte, value 2^(byte - 127); byte 255 is NaN. No sign, no
#: zero.
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

FormatLike = Format | str | npt.DTypeLike

_FNUZ = (
    "{call}: {given} is an FNUZ format (AMD CDNA3), whose bias and special codes differ from the "
    "OCP formats that jax_fp8 computes with; convert the values to float8_e4m3fn or float8_e5m2 "
    "(scaled_matmul takes them as they are with accumulation='cdna3_mfma')"
)


def from_dtype(dtype: npt.DTypeLike) -> Format | None:
    """Returns the format whose codes have `dtype`, or None."""
    dtype = np.dtype(dtype)
    return next((fmt for fmt in ALL if fmt.dtype == dtype), None)


def lookup(format: FormatLike, *, call: str = "formats.lookup") -> Format:
    """Returns the `Format` that a name, dtype or Format stands for.

    Args:
      format: "e4m3", "e4m3fn", "e5m2", "float8_e4m3fn", …, a dtype, or a Format.
      call: name of the public function, for messages.

    Raises:
      TypeError: not an OCP FP8 format; FNUZ formats are named as such.

    >>> lookup("e4m3").max, lookup(np.dtype("float8_e5m2")).name
    (448.0, 'e5m2')
    """
    if isinstance(format, Format):
        return format
    if isinstance(format, str):
        for fmt in ALL:
            if format.lower() in (fmt.name, *fmt.aliases):
                return fmt
        name = format.lower()
    else:
        try:
            dtype = np.dtype(format)
        except TypeError:
            raise TypeError(f"{call}: {format!r} is not an FP8 format; {_known()}") from None
        found = from_dtype(dtype)
        if found is not None:
            return found
        name = dtype.name
    if "fnuz" in name:
        raise TypeError(_FNUZ.format(call=call, given=name))
    raise TypeError(f"{call}: {format!r} is not an FP8 format; {_known()}")


def _known() -> str:
    return "use one of " + ", ".join(repr(fmt.name) for fmt in ALL)
