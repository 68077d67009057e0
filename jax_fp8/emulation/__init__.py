"""The accumulators of real hardware, bit for bit, on a CPU.

`jax_fp8.emulate` and the argument `accumulation=` of every call run whole GEMMs with them;
`instruction` runs one matrix instruction, for comparison with a device;
`error_study` measures how far sums are off.
"""

import importlib
from typing import Any

from jax_fp8.emulation.machines import MACHINES, Machine

__all__ = [
    "MACHINES",
    "ErrorRow",
    "Instruction",
    "Machine",
    "OverflowWarning",
    "count_overflows",
    "error_study",
    "instruction",
]

#: Names that load when they are first used: their modules need others, which need this table.
_LAZY = {
    "ErrorRow": "study",
    "Instruction": "instructions",
    "OverflowWarning": "overflow",
    "count_overflows": "overflow",
    "error_study": "study",
    "instruction": "instructions",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"jax_fp8.emulation.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'jax_fp8.emulation' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
