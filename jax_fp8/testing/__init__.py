"""Checks for FP8 code: of gradients, with injected faults, and the independent NumPy oracle.

>>> import numpy as np, jax_fp8 as fp8
>>> x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
>>> fp8.testing.check_vjp(fp8.matmul, (x, w), recipe=fp8.RowScaling())["C4"].value
0.0
"""

from jax_fp8.testing.faults import FAULTS, Fault, mutate
from jax_fp8.testing.lattice import lattice
from jax_fp8.testing.model import ModelReport, check_gradients
from jax_fp8.testing.oracle import quantize_np
from jax_fp8.testing.products import Intent
from jax_fp8.testing.report import CheckResult, VjpReport
from jax_fp8.testing.vjp import case_of, check_vjp, intent_of, report_of

__all__ = [
    "FAULTS",
    "CheckResult",
    "Fault",
    "Intent",
    "ModelReport",
    "VjpReport",
    "case_of",
    "check_gradients",
    "check_vjp",
    "intent_of",
    "lattice",
    "mutate",
    "quantize_np",
    "report_of",
]
