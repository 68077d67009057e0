"""Single matrix instructions, by the names that the vendors give them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_fp8 import formats, lowering
from jax_fp8.emulation.machines import MACHINES, Machine
from jax_fp8.scaling import scale_to_float32

__all__ = ["Instruction", "instruction"]

Array = jax.Array
ArrayLike = jax.typing.ArrayLike

_OPERANDS: Final = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "bf8": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_ACCUMULATORS: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
}

#: (family, architecture) -> machine by accumulator type.
_MACHINES: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("wgmma", "sm_90"): {"f32": "hopper_wgmma", "f16": "hopper_wgmma_f16"},
    ("mma", "sm_89"): {"f32": "ada_mma", "f16": "ada_mma_f16"},
    ("mma", "sm_90"): {"f32": "hopper_mma"},
    ("mma", "sm_120"): {"f32": "blackwell_tcgen05", "f16": "blackwell_tcgen05_f16"},
    ("mma.mx", "sm_120"): {"f32": "blackwell_tcgen05_blockscale"},
    ("tcgen05", "sm_100"): {"f32": "blackwell_tcgen05", "f16": "blackwell_tcgen05_f16"},
    ("tcgen05.mx", "sm_100"): {"f32": "blackwell_tcgen05_blockscale"},
    ("v_mfma", "gfx942"): {"f32": "cdna3_mfma"},
}
#: Shapes (m, n, k) that a family has. A range of n is (first, last, step).
_SHAPES: Final[dict[str, tuple[tuple[Any, Any, Any], ...]]] = {
    "wgmma": (((64,), range(8, 257, 8), (32,)),),
    "mma": (((16,), (8,), (16, 32)),),
    "mma.mx": (((16,), (8,), (32,)),),
    "tcgen05": (((64, 128), range(8, 257, 8), (32,)),),
    "tcgen05.mx": (((128,), range(8, 257, 8), (32,)),),
    "v_mfma": (((16,), (16,), (32,)), ((32,), (32,), (16,))),
}
#: Parts that a PTX name may have beside its shape and types, by family. They say nothing about the
#: arithmetic that the family doesn't.
_PARTS: Final[dict[str, frozenset[str]]] = {
    "wgmma": frozenset({"mma_async", "sync", "aligned"}),
    "mma": frozenset({"sync", "aligned", "row", "col", "kind::f8f6f4"}),
    "mma.mx": frozenset(
        {"sync", "aligned", "row", "col", "kind::mxf8f6f4", "block_scale", "block32",
         "scale_vec::1X", "ue8m0"}
    ),
    "tcgen05": frozenset({"mma", "cta_group::1", "kind::f8f6f4"}),
    "tcgen05.mx": frozenset(
        {"mma", "cta_group::1", "kind::mxf8f6f4", "block_scale", "block32", "scale_vec::1X",
         "ue8m0"}
    ),
}  # fmt: skip
_EXAMPLES: Final = (
    "wgmma.m64n8k32.f32.e4m3.e4m3, mma.m16n8k32.f32.e4m3.e5m2.f32, "
    "tcgen05.mma.m128n64k32.kind::f8f6f4.f32.e4m3.e4m3, "
    "tcgen05.mma.m128n8k32.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.ue8m0, "
    "v_mfma_f32_16x16x32_fp8_bf8"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One matrix instruction: call it on its operands.

    Attributes:
      name: as it was given.
      machine: whose arithmetic it has.
      shape: (m, n, k).
      a_dtype: dtype of a, (m, k).
      b_dtype: dtype of b, (k, n).
      c_dtype: dtype of c and d, (m, n): float32 or float16.
    """

    name: str
    machine: Machine
    shape: tuple[int, int, int]
    a_dtype: np.dtype[Any]
    b_dtype: np.dtype[Any]
    c_dtype: np.dtype[Any]

    def __call__(
        self,
        a: ArrayLike,
        b: ArrayLike,
        c: ArrayLike | None = None,
        a_scale: ArrayLike | None = None,
        b_scale: ArrayLike | None = None,
    ) -> Array:
        """d = a · b + c, as the device computes it.

        NaN is 0x7fffffff (float32) or 0x7fff (float16); a sum of zero is +0; infinities, subnormals
        and -0 in a, b and c count as the model of the machine says. It is a function of JAX arrays
        that runs on the CPU, jitted or not.

        Args:
          a: (m, k) codes, or their bytes as uint8.
          b: (k, n) codes, or their bytes as uint8.
          c: (m, n) accumulator; None is zero.
          a_scale: (m, k / 32) float8_e8m0fnu, for block-scaled instructions only.
          b_scale: (k / 32, n) float8_e8m0fnu.

        Returns:
          (m, n) array of `c_dtype`.

        Raises:
          TypeError: an operand of another dtype.
          ValueError: an operand of another shape, or scales that are missing or not wanted.
        """
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # if a GPU is the default
            return self._run(a, b, c, a_scale, b_scale)

    def _run(
        self,
        a: ArrayLike,
        b: ArrayLike,
        c: ArrayLike | None,
        a_scale: ArrayLike | None,
        b_scale: ArrayLike | None,
    ) -> Array:
        m, n, k = self.shape
        a = self._operand("a", a, (m, k), self.a_dtype)
        b = self._operand("b", b, (k, n), self.b_dtype)
        c = jnp.zeros((m, n), self.c_dtype) if c is None else c
        c = self._operand("c", c, (m, n), self.c_dtype)
        scales = [jnp.zeros((0,), jnp.float32)] * 2
        if self.machine.scales_inside:
            if a_scale is None or b_scale is None:
                raise ValueError(f"{self.name}: it multiplies by scales: give a_scale and b_scale")
            scales = [
                scale_to_float32(self._operand(side, scale, shape, formats.E8M0))
                for side, scale, shape in (
                    ("a_scale", a_scale, (m, k // 32)),
                    ("b_scale", b_scale, (k // 32, n)),
                )
            ]
        elif a_scale is not None or b_scale is not None:
            raise ValueError(f"{self.name}: it has no scales: leave a_scale and b_scale out")
        lowering.register()
        call = jax.ffi.ffi_call(
            "jax_fp8.instruction.v1",
            jax.ShapeDtypeStruct((m, n), self.c_dtype),
            vmap_method="sequential",
        )
        out: Array = call(a, b, c, *scales, accumulation=self.machine.name)
        return out

    def _operand(
        self, side: str, x: ArrayLike, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Array:
        x = jnp.asarray(x)
        if x.dtype == np.dtype(np.uint8) and dtype.itemsize == 1:
            x = jax.lax.bitcast_convert_type(x, dtype)
        if x.dtype != dtype:
            raise TypeError(f"{self.name}: {side} has dtype {x.dtype}; it must be {dtype.name}")
        if x.shape != shape:
            raise ValueError(f"{self.name}: {side} has shape {x.shape}; it must be {shape}")
        return x


def instruction(name: str, *, arch: str | None = None) -> Instruction:
    """The matrix instruction of this name, for a comparison with hardware bit by bit.

    Args:
      name: as PTX or the CDNA3 ISA writes it, with its shape; parts that do not change the
        arithmetic (`.sync`, `.aligned`, `.row`, …) may be left out. Families: wgmma, mma,
        tcgen05.mma and v_mfma.
      arch: "sm_89", "sm_90" or "sm_120" for mma, whose arithmetic differs between them; the others
        have one each.

    Returns:
      Instruction, to be called on (a, b, c).

    Raises:
      ValueError: no FP8 instruction that is emulated has this name, or arch is missing.

    >>> import numpy as np
    >>> wgmma = instruction("wgmma.m64n8k32.f32.e4m3.e4m3")
    >>> a, b = np.zeros((64, 32), wgmma.a_dtype), np.zeros((32, 8), wgmma.b_dtype)
    >>> a[0, :2], b[:2, 0] = (15, 0.125), (15, 0.0625)
    >>> float(wgmma(a, b)[0, 0])  # exact: 225.0078125
    225.0
    """
    family, shape, types = _parse_mfma(name) if name.startswith("v_mfma") else _parse_ptx(name)
    archs = [key[1] for key in _MACHINES if key[0] == family]
    if arch is not None and arch.startswith("sm_"):
        arch = arch.rstrip("af")  # sm_90a, sm_100f, … add instructions, not arithmetic
    if arch is None and len(archs) > 1:
        raise ValueError(f"instruction: {name!r} differs between GPUs; give arch={_either(archs)}")
    if arch is not None and arch not in archs:
        raise ValueError(f"instruction: arch is {arch!r}; {name!r} is known on {_either(archs)}")
    machines = _MACHINES[family, arch or archs[0]]
    if types[0] not in machines or not _has_shape(family, shape) or _mixes_vendors(types):
        raise ValueError(
            f"instruction: there is no {name!r} among the emulated ones; examples: {_EXAMPLES}"
        )
    return Instruction(
        name,
        MACHINES[machines[types[0]]],
        shape,
        _OPERANDS[types[1]],
        _OPERANDS[types[2]],
        _ACCUMULATORS[types[0]],
    )


def _either(names: list[str]) -> str:
    return " or ".join(repr(name) for name in names)


def _mixes_vendors(types: tuple[str, ...]) -> bool:
    return (types[1] in ("fp8", "bf8")) != (types[2] in ("fp8", "bf8"))


def _has_shape(family: str, shape: tuple[int, int, int]) -> bool:
    return any(
        all(size in sizes for size, sizes in zip(shape, choice, strict=True))
        for choice in _SHAPES[family]
    )


def _unknown(name: str) -> ValueError:
    return ValueError(f"instruction: {name!r} is not understood; examples: {_EXAMPLES}")


def _parse_mfma(name: str) -> tuple[str, tuple[int, int, int], tuple[str, str, str]]:
    match = re.fullmatch(r"v_mfma_(f32)_(\d+)x(\d+)x(\d+)_(fp8|bf8)_(fp8|bf8)", name)
    if match is None:
        raise _unknown(name)
    d, m, n, k, a, b = match.groups()
    return "v_mfma", (int(m), int(n), int(k)), (d, a, b)


def _parse_ptx(name: str) -> tuple[str, tuple[int, int, int], tuple[str, str, str]]:
    family, *parts = name.split(".")
    if family not in ("wgmma", "mma", "tcgen05"):
        raise _unknown(name)
    if "kind::mxf8f6f4" in parts and family != "wgmma":
        family += ".mx"
    shapes = [match for part in parts if (match := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part))]
    types = [part for part in parts if part in _ACCUMULATORS or part in ("e4m3", "e5m2")]
    known = [*(match.group() for match in shapes), *types]
    if [part for part in parts if part not in known and part not in _PARTS[family]]:
        raise _unknown(name)
    # D, A, B, and for mma C, which is of D's type.
    if len(shapes) != 1 or len(types) not in (3, 4) or types[3:] not in ([], types[:1]):
        raise _unknown(name)
    d, a, b = types[:3]
    if d not in _ACCUMULATORS or a not in _OPERANDS or b not in _OPERANDS:
        raise _unknown(name)
    m, n, k = (int(size) for size in shapes[0].groups())
    return family, (m, n, k), (d, a, b)
