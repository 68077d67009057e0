"""The accumulators of real hardware, and some of software, as rows of a table.

A kernel that emulates a machine follows the numbers contract: k is cut at every tile edge of either
operand and, within, at every `promotion_interval`; each piece starts from +0 and is added up as its
row says; the FP32 results of the pieces are scaled and added in FP32.

Sources:

- MMA-Sim: "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores", arXiv
  2511.10909, and its package mmasim 2.1.1, whose authors report equal bits on the GPUs.
- cutlass #1986: NVIDIA's answer that Hopper has no FP8 mma.sync: operands are converted to FP16 and
  go through the FP16 tensor core.
- DeepSeek-V3, arXiv 2412.19437: sums in FP32 every 128 products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

__all__ = ["MACHINES", "Machine"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """How a machine adds up products.

    Attributes:
      name: what `accumulation=` takes.
      summation: "aligned": `step` products and the accumulator are aligned to the largest exponent
        of them all, cut toward zero `fraction_bits` below it, added exactly and rounded. "grouped":
        products of even and of odd index are aligned and cut apart from each other first.
        "sequential": one after another, rounded each time. "chunked": `step` products in a chain of
        FP32 FMAs, then added to the accumulator and rounded. "pairwise": a balanced binary tree of
        FP32 additions. "exact": rounded once.
      step: products that are added at once.
      fraction_bits: see "aligned".
      rounding: of the accumulator: "rz" toward zero or "rne" to nearest even, and the type; E8M13
        is FP32 without its last ten bits.
      zero_exponent: exponent that a term of zero brings into the alignment.
      fp16_operands: operands are converted to FP16 first, and align as FP16 values do.
      scales_inside: a step multiplies by two E8M0 scales, one pair for every 32 products.
      fnuz_operands: FNUZ codes are accepted beside the OCP formats.
      ignores_interval: the accumulator is FP32 or better, and is never promoted.
      default_interval: `promotion_interval` where nobody gives one; None is never.
      source: where the facts come from.
    """

    name: str
    summation: str
    step: int
    fraction_bits: int
    rounding: str
    zero_exponent: int = 0
    fp16_operands: bool = False
    scales_inside: bool = False
    fnuz_operands: bool = False
    ignores_interval: bool = False
    default_interval: int | None = None
    source: str = ""

    @property
    def is_fp16(self) -> bool:
        """Whether sums beyond 65504 overflow."""
        return self.rounding == "rne_fp16"

    def takes_interval(self, interval: int) -> bool:
        """Whether sums can be promoted after so many products."""
        return self.ignores_interval or interval % self.step == 0

    @property
    def is_short(self) -> bool:
        """Whether the accumulator has fewer bits than FP32."""
        return not self.rounding.endswith("fp32")


_MMA_SIM = "MMA-Sim (arXiv 2511.10909; mmasim 2.1.1)"
_ROWS: Final = (
    Machine(
        "hopper_wgmma", "aligned", 32, 13, "rz_e8m13", -133, default_interval=128,
        source=f"{_MMA_SIM}, WGMMA with .f32 D; interval: DeepSeek-V3, arXiv 2412.19437",
    ),
    Machine(
        "hopper_wgmma_f16", "aligned", 32, 13, "rne_fp16", -21,
        source=f"{_MMA_SIM}, WGMMA with .f16 D",
    ),
    Machine(
        "hopper_mma", "aligned", 16, 25, "rz_fp32", -133, fp16_operands=True,
        source=f"{_MMA_SIM}, Hopper's FP16 mma.sync, by which FP8 is run there: cutlass #1986",
    ),
    Machine(
        "ada_mma", "aligned", 16, 13, "rz_e8m13", -132, default_interval=128,
        source=f"{_MMA_SIM}, mma.sync of sm_89 with .f32 D",
    ),
    Machine(
        "ada_mma_f16", "aligned", 16, 13, "rne_fp16", -20,
        source=f"{_MMA_SIM}, mma.sync of sm_89 with .f16 D",
    ),
    Machine(
        "blackwell_tcgen05", "aligned", 32, 25, "rz_fp32", -133,
        source=f"{_MMA_SIM}, tcgen05.mma kind::f8f6f4 and mma.sync of sm_120 with .f32 D",
    ),
    Machine(
        "blackwell_tcgen05_f16", "aligned", 32, 25, "rne_fp16", -21,
        source=f"{_MMA_SIM}, tcgen05.mma kind::f8f6f4 and mma.sync of sm_120 with .f16 D",
    ),
    Machine(
        "blackwell_tcgen05_blockscale", "aligned", 32, 25, "rz_fp32", -133, scales_inside=True,
        source=f"{_MMA_SIM}, tcgen05.mma kind::mxf8f6f4 and mma.sync of sm_120",
    ),
    Machine(
        "cdna3_mfma", "grouped", 16, 24, "rne_fp32", -999, fnuz_operands=True,
        source=f"{_MMA_SIM}, v_mfma_f32_*_fp8/bf8 of gfx942",
    ),
    Machine(
        "fp32", "sequential", 1, 0, "rne_fp32", ignores_interval=True,
        source="the numbers contract: one chain of FP32 FMAs in ascending k",
    ),
    Machine(
        "fp32_pairwise", "pairwise", 1, 0, "rne_fp32", ignores_interval=True,
        source="Higham, Accuracy and Stability of Numerical Algorithms, section 4.1",
    ),
    Machine(
        "fp16", "sequential", 1, 0, "rne_fp16",
        source="no hardware: an FP16 FMA after every product",
    ),
    Machine(
        "fp16_chunked", "chunked", 32, 0, "rne_fp16",
        source="no hardware: FP32 within 32 products, FP16 between",
    ),
    Machine(
        "bf16_chunked", "chunked", 32, 0, "rne_bf16",
        source="no hardware: FP32 within 32 products, BF16 between",
    ),
    Machine(
        "exact", "exact", 1, 0, "rne_fp32", ignores_interval=True,
        source="no hardware: the exact sum, rounded once",
    ),
)  # fmt: skip

#: Every accumulation model by its name.
MACHINES: Final[Mapping[str, Machine]] = {machine.name: machine for machine in _ROWS}
