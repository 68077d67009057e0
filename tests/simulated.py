"""The instructions of mmasim 2.1.1, MMA-Sim's reference model, for operands of any size.

Only who calls needs torch and mmasim: this module imports them when it is first asked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from emulation_cases import formats_of

__all__ = ["ROWS", "Row", "simulate"]

Array = npt.NDArray[Any]


class Row(NamedTuple):
    """One instruction, with the letters {a} and {b} where its formats go.

    Attributes:
      machine: name of the accumulation model.
      name: as `jax_fp8.emulation.instruction` takes it.
      arch: likewise.
      operation: class of mmasim.
      gpu: what that class calls the GPU.
      shape_and_type: what it calls the instruction.
      size_k: k of the latter.
    """

    machine: str
    name: str
    arch: str | None
    operation: str
    gpu: str
    shape_and_type: str
    size_k: int = 32

    @property
    def formats(self) -> list[tuple[str, str]]:
        """Names of the formats of a and b, in all combinations."""
        return list(itertools.product(formats_of(self.machine), repeat=2))


_TCGEN05, _MMA = "tcgen05.mma.m128n256k32.kind::", "mma.m16n8k32."
#: One for each family, accumulator type and architecture. Wide ones give many sums in one call.
ROWS = (
    Row(
        "hopper_wgmma", "wgmma.m64n256k32.f32.{a}.{b}", None,
        "WGMMA", "Hopper", "m64n256k32.f32.{a}.{b}",
    ),
    Row(
        "hopper_wgmma_f16", "wgmma.m64n256k32.f16.{a}.{b}", None,
        "WGMMA", "Hopper", "m64n256k32.f16.{a}.{b}",
    ),
    Row(  # it has no FP8 mma.sync: operands are converted and go through the FP16 one
        "hopper_mma", _MMA + "f32.{a}.{b}.f32", "sm_90",
        "MMA", "Hopper", "m16n8k16.f32.f16.f16.f32", 16,
    ),
    Row(
        "ada_mma", _MMA + "f32.{a}.{b}.f32", "sm_89",
        "MMA", "Ada Lovelace", "m16n8k32.f32.{a}.{b}.f32",
    ),
    Row(
        "ada_mma_f16", _MMA + "f16.{a}.{b}.f16", "sm_89",
        "MMA", "Ada Lovelace", "m16n8k32.f16.{a}.{b}.f16",
    ),
    Row(
        "blackwell_tcgen05", _TCGEN05 + "f8f6f4.f32.{a}.{b}", None,
        "TCGen05MMA", "Blackwell", "m128n256k32.kind::f8f6f4.f32.{a}.{b}",
    ),
    Row(
        "blackwell_tcgen05_f16", _TCGEN05 + "f8f6f4.f16.{a}.{b}", None,
        "TCGen05MMA", "Blackwell", "m128n256k32.kind::f8f6f4.f16.{a}.{b}",
    ),
    Row(
        "blackwell_tcgen05", _MMA + "f32.{a}.{b}.f32", "sm_120",
        "MMA", "RTX Blackwell", "m16n8k32.f32.{a}.{b}.f32",
    ),
    Row(
        "blackwell_tcgen05_f16", _MMA + "f16.{a}.{b}.f16", "sm_120",
        "MMA", "RTX Blackwell", "m16n8k32.f16.{a}.{b}.f16",
    ),
    Row(
        "blackwell_tcgen05_blockscale", _TCGEN05 + "mxf8f6f4.block32.f32.{a}.{b}.ue8m0", None,
        "TCGen05MMABlockScale", "Blackwell",
        "m128n256k32.kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0",
    ),
    Row(
        "blackwell_tcgen05_blockscale", _MMA + "kind::mxf8f6f4.block32.f32.{a}.{b}.f32.ue8m0",
        "sm_120", "MMABlockScale", "RTX Blackwell",
        "m16n8k32.kind::mxf8f6f4.block32.f32.{a}.{b}.f32.ue8m0",
    ),
    Row(
        "cdna3_mfma", "v_mfma_f32_16x16x32_{a}_{b}", None,
        "MFMA", "CDNA3", "f32_16x16x32_{a}_{b}",
    ),
    Row(
        "cdna3_mfma", "v_mfma_f32_32x32x16_{a}_{b}", None,
        "MFMA", "CDNA3", "f32_32x32x16_{a}_{b}", 16,
    ),
)  # fmt: skip


def simulate(
    row: Row, formats: tuple[str, str], a: Array, b: Array, c: Array, *scales: Array
) -> Array:
    """d = a · b + c by an instruction that is repeated along k as often as it takes.

    Args:
      row: of `ROWS`.
      formats: names of the formats of a and b.
      a: (*batch, m, k) codes; k is any multiple of the instruction's.
      b: (*batch, k, n) codes.
      c: (*batch, m, n) float32 or float16.
      scales: (*batch, m, k / 32) and (*batch, k / 32, n) E8M0 scales of block-scaled instructions.
    """
    import torch

    names = dict(zip("ab", formats, strict=True))
    dot = _dot(row.operation, row.gpu, row.shape_and_type.format(**names))
    factors = [_tensor(x) for x in (a, np.swapaxes(b, -1, -2))]
    if ".f16.f16." in row.shape_and_type:
        factors = [x.half() for x in factors]
    factors += [_tensor(x) for x in (scales[0], np.swapaxes(scales[1], -1, -2))] if scales else []
    # (*batch, m, n, k) of every factor, without copies.
    turned = [
        x[..., :, None, :] if i % 2 == 0 else x[..., None, :, :] for i, x in enumerate(factors)
    ]
    vectors = [x.expand(*c.shape, x.shape[-1]) for x in turned]
    d = torch.tensor(c)
    for k in range(0, a.shape[-1], row.size_k):
        pair = [x[..., k : k + row.size_k] for x in vectors[:2]]
        d = dot(*pair, d, *(x[..., k // 32 : k // 32 + 1] for x in vectors[2:]))
    out: Array = d.numpy()
    return out


def _tensor(x: Array) -> Any:
    """A torch tensor with the codes and the dtype of x."""
    import torch

    return torch.tensor(np.ascontiguousarray(x).view(np.uint8)).view(getattr(torch, x.dtype.name))


@functools.cache
def _dot(operation: str, gpu: str, shape_and_type: str) -> Callable[..., Any]:
    """mmasim's dot product with accumulation along the last dim."""
    import torch
    from mmasim import nv_ptx

    torch.set_num_threads(
        1
    )  # dozens of small operations: threads that wait for each other are slower
    if operation == "MFMA":
        from mmasim import amd as module  # compiles a helper when it is first imported
    else:
        module = nv_ptx
    dot: Callable[..., Any] = getattr(module, operation)(gpu, shape_and_type).dpa
    return dot
