"""The presets of `python -m jax_fp8 bench`, by name."""

from typing import Final

from jax_fp8.bench.cases import Preset
from jax_fp8.bench.presets.accuracy import ACCURACY
from jax_fp8.bench.presets.decode import DECODE
from jax_fp8.bench.presets.emulate import EMULATE
from jax_fp8.bench.presets.gemm import LLM, SQUARE
from jax_fp8.bench.presets.overhead import OVERHEAD
from jax_fp8.bench.presets.quantize import QUANTIZE
from jax_fp8.bench.presets.train import TRAIN

__all__ = ["PRESETS"]

PRESETS: Final[dict[str, Preset]] = {
    "square": SQUARE,
    "decode": DECODE,
    "llm": LLM,
    "train": TRAIN,
    "quantize": QUANTIZE,
    "emulate": EMULATE,
    "overhead": OVERHEAD,
    "accuracy": ACCURACY,
}
