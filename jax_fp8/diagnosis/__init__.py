"""Where FP8 hurts: every FP8 GEMM of a function and of its gradients, measured and judged.

`jax_fp8.diagnose(fn, *args)` runs a loss once and tells, worst first, which tensor of which layer
loses what, why, and which recipe would keep it. `jax_fp8.watch` keeps an eye on a training run.
"""

from jax_fp8.diagnosis.diagnose import Diagnosis, diagnose
from jax_fp8.diagnosis.verdicts import Verdict
from jax_fp8.diagnosis.watch import watch

__all__ = ["Diagnosis", "Verdict", "diagnose", "watch"]
