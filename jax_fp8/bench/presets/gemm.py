"""`square` and `llm`: whole GEMMs on operands that are quantised already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from jax_fp8.bench.cases import Case, Options, Preset, Shape
from jax_fp8.bench.contenders import Gemm, gemm_contenders
from jax_fp8.bench.memory import available_bytes
from jax_fp8.bench.operands import Weights

__all__ = ["LLM", "SQUARE"]

#: Bytes an element of the weights when every contender has its copy: float32, bfloat16 and float16
#: in two layouts, FP8 under three recipes in two layouts, and the float32 source.
_BYTES_PER_WEIGHT: Final = 2 * (4 + 2 + 2 + 3) + 4

#: Larger layers are not among the default ones.
_MAX_WEIGHTS: Final = 150_000_000

#: Tokens of a batch in `llm`.
_TOKENS: Final = 128

#: (n, k) by layer. DeepSeek-V3: hidden size 7168, 128 heads, query and key-value latents of 1536
#: and 512, head sizes 128 + 64 (position) and 128, experts of 2048 (arXiv 2412.19437, section 4.2).
#: Llama 3: hidden sizes 4096 and 8192, 32 and 64 heads of 128, 8 key-value heads, feed-forward
#: sizes 14336 and 28672 (arXiv 2407.21783, table 3); query, key and value are one GEMM, gate and
#: up another.
_LAYERS: Final[dict[tuple[int, int], str]] = {
    (2112, 7168): "DeepSeek-V3 latents",
    (24576, 1536): "DeepSeek-V3 queries",
    (32768, 512): "DeepSeek-V3 keys and values",
    (7168, 16384): "DeepSeek-V3 attention out",
    (4096, 7168): "DeepSeek-V3 expert gate and up",
    (7168, 2048): "DeepSeek-V3 expert down",
    (6144, 4096): "Llama-3-8B QKV",
    (4096, 4096): "Llama-3-8B attention out",
    (28672, 4096): "Llama-3-8B gate and up",
    (4096, 14336): "Llama-3-8B down",
    (10240, 8192): "Llama-3-70B QKV",
    (8192, 8192): "Llama-3-70B attention out",
    (57344, 8192): "Llama-3-70B gate and up",
    (8192, 28672): "Llama-3-70B down",
}


def _cases(shapes: Sequence[Shape], options: Options, cut: list[str]) -> Iterator[Case]:
    for m, n, k in shapes:
        size = f"{m} x {n} x {k}"
        layer = _LAYERS.get((n, k), "") if m == _TOKENS else ""
        name = f"{layer}, {size}" if layer else size
        needed, available = n * k * _BYTES_PER_WEIGHT + 20 * m * (n + k), available_bytes()
        if available is not None and needed > 0.8 * available:
            cut.append(f"{name}: {needed / 2**30:.1f} GiB of operands, too much for this memory")
            continue
        # Nothing here holds on to it: its operands are gone before those of the next are made.
        yield _case(name, (m, n, k), options, cut)


def _case(name: str, shape: Shape, options: Options, cut: list[str]) -> Case:
    m, n, k = shape
    gemm = Gemm(m, Weights(n, k, options.seed), options)
    contenders = gemm_contenders(gemm, ("tensor", "row", "block"), cut)
    return Case(name=name, shape=shape, contenders=contenders)


_NOTES: Final = (
    "operands are quantised beforehand: FP8 in, float32 out, decoding and packing included",
    "weights in both layouts; the faster one counts, for us and for every peer",
    "XLA f8 is its dot_general of the codes alone, without scales",
)

SQUARE: Final = Preset(
    title="cubes",
    shapes=[(size,) * 3 for size in (512, 1024, 2048, 4096)],
    quick=[(size,) * 3 for size in (512, 1024)],
    cases=_cases,
    notes=_NOTES,
)
LLM: Final = Preset(
    title="layers of DeepSeek-V3 and Llama 3 for 128 tokens",
    shapes=[(_TOKENS, n, k) for n, k in _LAYERS if n * k <= _MAX_WEIGHTS],
    cases=_cases,
    notes=(
        *_NOTES,
        "left out, for the minutes that each takes: "
        + "; ".join(
            f"{what}, --shape {_TOKENS},{n},{k}"
            for (n, k), what in _LAYERS.items()
            if n * k > _MAX_WEIGHTS
        ),
        "sizes follow from arXiv 2412.19437, section 4.2, and arXiv 2407.21783, table 3",
    ),
)
