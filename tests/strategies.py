"""Generated test cases: shapes, layouts, tiles, formats, and values over the whole exponent range.

Hypothesis draws what decides a case's structure; the bulk of the values comes from a NumPy
generator whose seed hypothesis draws, so that a case stays small and repeatable.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from jax_fp8 import formats
from jax_fp8.formats import Format
from jax_fp8.testing import oracle

__all__ = [
    "GemmCase",
    "Operand",
    "Problem",
    "canonical",
    "formats_of_values",
    "gemm_cases",
    "matmul_arguments",
    "random_codes",
    "random_scales",
    "seeds",
    "shapes",
    "sizes",
    "tile_sizes",
    "tiles",
    "varied_numbers",
]

Array = npt.NDArray[Any]
Dims = tuple[int, ...]

#: Sizes at and beside the edges of register tiles, vectors and cache blocks.
_EDGES = sorted(
    {0, 1, 2, 300}
    | {edge + d for edge in (12, 16, 24, 32, 64, 128, 256) for d in (-1, 0, 1)}
)  # fmt: skip

formats_of_values = st.sampled_from(formats.ALL)
seeds = st.integers(0, 2**32 - 1)


def sizes(largest: int = 300) -> st.SearchStrategy[int]:
    """A size from 0 to `largest`, often at an edge."""
    edges = [size for size in _EDGES if size <= largest]
    return st.one_of(
        st.sampled_from(edges), st.integers(0, largest), st.integers(largest // 2, largest)
    )


def shapes(
    max_dims: int = 4, max_elements: int = 20_000, largest: int = 300
) -> st.SearchStrategy[Dims]:
    """A shape of at most `max_elements`."""

    @st.composite
    def draw_shape(draw: st.DrawFn) -> Dims:
        shape: list[int] = []
        for _ in range(draw(st.integers(0, max_dims))):
            room = max_elements // max(math.prod(shape), 1)
            shape.append(draw(sizes(min(largest, room))))
        return tuple(draw(st.permutations(shape)))

    return draw_shape()


def tile_sizes(dim: int) -> st.SearchStrategy[int]:
    """What one scale covers along a dim: one, all, a usual block, ragged, or more than there is."""
    return st.one_of(
        st.sampled_from([-1, 1, 32, 128]),
        st.integers(1, max(dim, 1)),
        st.integers(max(dim, 1), dim + 40),
    )


@st.composite
def tiles(draw: st.DrawFn, shape: Dims) -> Dims:
    """A tile size for each of some trailing dims."""
    rank = draw(st.integers(0, len(shape)))
    return tuple(draw(tile_sizes(dim)) for dim in shape[len(shape) - rank :])


# --- Values ---------------------------------------------------------------------------------------


def random_codes(
    rng: np.random.Generator, fmt: Format, shape: Dims, *, finite: bool = True
) -> Array:
    """Codes of `fmt`, each as likely as any other: exponents are spread over the whole range."""
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    if finite:
        codes = codes[np.isfinite(codes.astype(np.float32))]
    return codes[rng.integers(0, codes.size, shape)]


def random_scales(
    rng: np.random.Generator, shape: Dims, exponents: tuple[int, int] = (-30, 30)
) -> npt.NDArray[np.float32]:
    """Positive scales with a random mantissa and an exponent from a range, subnormals included."""
    mantissa, exponent = rng.uniform(1, 2, shape), rng.integers(*exponents, shape, endpoint=True)
    return np.asarray(np.ldexp(mantissa, exponent), np.float32)


def varied_numbers(shape: Dims, dtype: np.dtype[Any]) -> Array:
    """Numbers whose magnitude varies a lot from tile to tile, with zeros and non-finite ones."""
    rng = np.random.default_rng(math.prod(shape) + len(shape))
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))
    x = np.where(rng.random(shape) < 0.01, rng.choice([0, np.nan, np.inf, -np.inf], shape), x)
    return np.asarray(x).astype(dtype)


# --- GEMMs of any dimension_numbers ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand as a caller has it, and how it becomes a matrix.

    Attributes:
      values: FP8 array with its dims in any order.
      scale: float32 scale of shape ceil(values.shape / tile).
      tile: a size >= 1 per dim of values.
      order: permutation to (batch..., free..., contracting...); free dims as they lie in memory.
      num_batch: how many of those are batch dims.
      num_contracting: how many are contracting dims.
      tile_k: what one scale covers along the merged contracting dims.
    """

    values: Array
    scale: npt.NDArray[np.float32]
    tile: Dims
    order: Dims
    num_batch: int
    num_contracting: int
    tile_k: int

    @property
    def batch(self) -> Dims:
        return self.order[: self.num_batch]

    @property
    def contracting(self) -> Dims:
        return self.order[len(self.order) - self.num_contracting :]

    @property
    def free_shape(self) -> Dims:
        free = self.order[self.num_batch : len(self.order) - self.num_contracting]
        return tuple(self.values.shape[d] for d in free)

    def matrix(self) -> tuple[Array, npt.NDArray[np.float32], tuple[int, int]]:
        """(batch, rows, k) values, their scale with one row per row, and that scale's tile."""
        scale = oracle.expand_scale_np(self.scale, self.values.shape, self.tile)
        k = math.prod(self.values.shape[d] for d in self.contracting)
        batch = math.prod(self.values.shape[d] for d in self.batch)
        shape = (batch, math.prod(self.free_shape), k)
        values, scale = (x.transpose(self.order).reshape(shape) for x in (self.values, scale))
        return values, scale[..., :: self.tile_k], (1, self.tile_k)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The canonical form of a case, as the oracle takes it."""

    lhs: Array
    rhs: Array
    lhs_scale: npt.NDArray[np.float32]
    rhs_scale: npt.NDArray[np.float32]
    lhs_tile: tuple[int, int]
    rhs_tile: tuple[int, int]

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.lhs, self.rhs, self.lhs_scale, self.rhs_scale, self.lhs_tile, self.rhs_tile,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GemmCase:
    """A call of scaled_dot_general."""

    lhs: Operand
    rhs: Operand
    out_dtype: np.dtype[Any]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints of a failure."""
        sides = ", ".join(
            f"{x.values.dtype}{x.values.shape} tile {x.tile}" for x in (self.lhs, self.rhs)
        )
        printer.text(f"GemmCase({sides}, {self.dimension_numbers} -> {self.out_dtype})")

    @property
    def dimension_numbers(self) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
        return (
            (self.lhs.contracting, self.rhs.contracting),
            (self.lhs.batch, self.rhs.batch),
        )

    @property
    def out_shape(self) -> Dims:
        batch = tuple(self.lhs.values.shape[d] for d in self.lhs.batch)
        return (*batch, *self.lhs.free_shape, *self.rhs.free_shape)

    def problem(self) -> Problem:
        lhs, rhs = self.lhs.matrix(), self.rhs.matrix()
        return Problem(lhs[0], rhs[0], lhs[1], rhs[1], lhs[2], rhs[2])


@st.composite
def _split(draw: st.DrawFn, size: int) -> Dims:
    """Sizes of no, one or several dims whose product is `size`."""
    if size == 1 and draw(st.booleans()):
        return ()
    dims = [size]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        last = dims.pop()
        divisors = [d for d in range(1, last + 1) if last % d == 0] or [1, 3]
        first = draw(st.sampled_from(divisors))
        dims += [first, last // first]
    return tuple(dims)


@st.composite
def _contracting_tiles(draw: st.DrawFn, dims: Dims) -> tuple[Dims, int]:
    """Tiles of contracting dims that tile them as one dim too, and the tile of that dim.

    Such are: ones, then a tile that divides its dim (or is ragged, if nothing comes before it),
    then whole dims.
    """
    if not dims:
        return (), 1
    split = draw(st.integers(0, len(dims) - 1))
    outer, dim, inner = dims[:split], dims[split], dims[split + 1 :]
    if math.prod(outer) == 1:
        size = draw(tile_sizes(dim))
    else:
        size = draw(st.sampled_from([d for d in range(1, dim + 1) if dim % d == 0] or [1]))
    covered = min(max(dim, 1) if size == -1 else size, max(dim, 1))
    return (*(1 for _ in outer), size, *(-1 for _ in inner)), covered * math.prod(
        max(d, 1) for d in inner
    )


@st.composite
def _operands(draw: st.DrawFn, batch: Dims, free: Dims, contracting: Dims, finite: bool) -> Operand:
    dims = (*batch, *free, *contracting)
    k_tiles, tile_k = draw(_contracting_tiles(contracting))
    canonical_tile = (*(draw(tile_sizes(dim)) for dim in (*batch, *free)), *k_tiles)
    # memory[i] is the canonical dim that lies at place i in memory.
    memory = draw(st.one_of(st.just(tuple(range(len(dims)))), st.permutations(range(len(dims)))))
    shape = tuple(dims[d] for d in memory)
    tile = [canonical_tile[d] for d in memory]
    place = [int(i) for i in np.argsort(memory)]  # of each canonical dim in memory
    free_end = len(batch) + len(free)
    order = (*place[: len(batch)], *sorted(place[len(batch) : free_end]), *place[free_end:])
    rng = np.random.default_rng(draw(seeds))
    fmt = draw(formats_of_values)
    tile = tuple(max(dim, 1) if t == -1 else t for t, dim in zip(tile, shape, strict=True))
    scale_shape = tuple(-(-dim // t) for dim, t in zip(shape, tile, strict=True))
    return Operand(
        values=random_codes(rng, fmt, shape, finite=finite),
        scale=random_scales(rng, scale_shape),
        tile=tile,
        order=order,
        num_batch=len(batch),
        num_contracting=len(contracting),
        tile_k=tile_k,
    )


@st.composite
def gemm_cases(
    draw: st.DrawFn, *, largest: int = 300, max_products: int = 3_000_000, finite: bool = True
) -> GemmCase:
    """A call of scaled_dot_general with any dims, tiles, formats and output type.

    Args:
      draw: given by hypothesis.
      largest: of m, n and k.
      max_products: of batch · m · n · k, beyond which sizes are cut.
      finite: whether to leave out codes of NaN and infinity.
    """
    batch = draw(st.sampled_from([(), (), (), (3,), (2, 3), (2,), (1,), (1, 2), (0,)]))
    room, mnk = max_products // max(math.prod(batch), 1), {}
    for name in draw(st.permutations(["m", "n", "k"])):  # the last gets what room there is left
        mnk[name] = draw(sizes(min(largest, room)))
        room //= max(mnk[name], 1)
    m, n, k = mnk["m"], mnk["n"], mnk["k"]
    contracting = draw(_split(k))
    return GemmCase(
        lhs=draw(_operands(batch, draw(_split(m)), contracting, finite)),
        rhs=draw(_operands(batch, draw(_split(n)), contracting, finite)),
        out_dtype=draw(st.sampled_from(_OUT_DTYPES)),
    )


_OUT_DTYPES = tuple(np.dtype(name) for name in ("float32", "bfloat16", "float16"))


# --- Arguments of scaled_matmul -------------------------------------------------------------------


def matmul_arguments(
    seed: int,
    m: int,
    n: int,
    k: int,
    lhs_tile: tuple[int, int],
    rhs_tile: tuple[int, int],
    batch: tuple[int, ...] = (),
    exponents: tuple[int, int] = (-30, 30),
    lhs_format: Format = formats.E4M3FN,
    rhs_format: Format = formats.E5M2,
) -> dict[str, Any]:
    """Arguments of scaled_matmul, every code and scale random; tiles as (m, k) and (k, n)."""
    rng = np.random.default_rng(seed)
    arguments: dict[str, Any] = {"lhs_tile": lhs_tile, "rhs_tile": rhs_tile}
    for side, shape, tile, fmt in (
        ("lhs", (m, k), lhs_tile, lhs_format),
        ("rhs", (k, n), rhs_tile, rhs_format),
    ):
        counts = tuple(-(-dim // size) for dim, size in zip(shape, tile, strict=True))
        arguments[side] = random_codes(rng, fmt, (*batch, *shape))
        arguments[f"{side}_scale"] = random_scales(rng, (*batch, *counts), exponents)
    return arguments


def canonical(arguments: dict[str, Any]) -> tuple[Any, ...]:
    """The oracle's arguments of a call of scaled_matmul."""
    return (
        arguments["lhs"],
        arguments["rhs"].swapaxes(-1, -2),
        arguments["lhs_scale"],
        np.swapaxes(arguments["rhs_scale"], -1, -2),
        arguments["lhs_tile"],
        arguments["rhs_tile"][::-1],
    )
