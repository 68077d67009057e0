"""The compiled module: XLA FFI handlers and the kernel tables (ffi/module.cc)."""

from typing import Any

def registrations() -> dict[tuple[str, str], Any]:
    """(FFI target, XLA platform name) -> capsule of its handler."""

def ffi_api_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI headers that this module was built with."""

def kernels() -> list[list[str]]:
    """[operation, row name, why this machine cannot run it or '', why it must be asked for or '']
    for every row."""

def explain_gemm(
    m: int,
    n: int,
    k: int,
    lhs_format: str,
    rhs_format: str,
    out_type: str,
    lhs_layout: str,
    rhs_layout: str,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
    accumulation: str,
    promotion_interval: int,
    split_k: int,
    kernel: str,
    any_order: bool,
) -> list[tuple[str, str]]:
    """(row name, reason why it refuses or '') for every GEMM row, in order of preference."""

def machines() -> list[tuple[str, str, int, int, str, int, bool, bool, bool, bool]]:
    """The facts of every accumulation model, as rows of jax_fp8.emulation.machines."""

def fp16_overflow_count() -> int:
    """Results of FP16 accumulators that were not finite although their operands were."""

def peaks() -> list[list[str]]:
    """[name, unit "FLOP" or "byte", instruction, reason why it cannot run or ''] for every peak."""

def measure_multiply(name: str, seconds: float) -> tuple[float, float]:
    """(FLOPs, seconds) of an instruction that runs for at least so long on this thread.

    Raises:
      ValueError: there is no such peak that counts FLOPs, or it cannot run here.
    """

class ReadBuffer:
    """Memory whose reading is timed, on pages of 2 MB or on those that any array gets."""

    def __init__(self, size_bytes: int, huge_pages: bool) -> None: ...
    @property
    def size_bytes(self) -> int:
        """Size, rounded up to 2 MB."""

    def read(self, name: str, first_byte: int, num_bytes: int) -> float:
        """Reads these bytes, multiples of 512, once with the loads of a peak; returns its seconds.

        A byte of each page is read before, untimed: systems reclaim memory that nobody uses.
        """
