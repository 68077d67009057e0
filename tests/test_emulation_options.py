"""Who says how a GEMM adds up: argument > context > recipe > default, for each of the three GEMMs.

Gradients are compared with scaled calls on operands that were quantised by hand, bit by bit.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jax_fp8 as fp8
from checks import assert_same_bits
from emulation_cases import Case
from jax_fp8 import PerGemm

pytestmark = pytest.mark.filterwarnings("ignore::jax_fp8.emulation.OverflowWarning")

Array = np.ndarray[Any, Any]
Request = tuple[str, int, int]

RNG = np.random.default_rng(0)
X, W, G = (
    (RNG.standard_normal(shape) + 0.5).astype(np.float32)
    for shape in ((300, 140), (140, 70), (300, 70))
)
NATIVE: Request = ("native", 0, 1)


def requests(function: Any, *operands: Any) -> list[Request]:
    """(accumulation, promotion_interval, split_k) of the GEMMs of a function, in lowered order."""
    text = jax.jit(lambda *x: function(*x)).lower(*operands).as_text()
    found = []
    for line in text.splitlines():
        if "@jax_fp8.gemm.v1" in line:
            interval, split = (
                int(line.split(f"{name} = ")[1].split(" ")[0])
                for name in ("promotion_interval", "split_k")
            )
            found.append((line.split('accumulation = "')[1].split('"')[0], interval, split))
    return found


def product(x: Any = X, w: Any = W, **options: Any) -> Any:
    return fp8.matmul(x, w, **options)


def three(function: Any) -> dict[str, Request]:
    """What each of the three GEMMs of matmul asks for."""
    forward = requests(function, X, W)
    dgrad = requests(lambda x, w, g: jax.vjp(lambda x: function(x, w), x)[1](g), X, W, G)
    wgrad = requests(lambda x, w, g: jax.vjp(lambda w: function(x, w), w)[1](g), X, W, G)
    return {"forward": forward[-1], "dgrad": dgrad[-1], "wgrad": wgrad[-1]}


# --- Precedence -----------------------------------------------------------------------------------

#: Three values of each option, no two of which are equal, and none of which is a default.
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "accumulation": ("hopper_wgmma", "blackwell_tcgen05", "fp16"),
    "promotion_interval": (32, 64, 256),
    "split_k": (2, 3, 4),
}
FIELDS = {"accumulation": 0, "promotion_interval": 1, "split_k": 2}


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)), ids=str)
def test_argument_goes_before_context_before_recipe_before_default(
    option: str, given: tuple[bool, bool, bool]
) -> None:
    values = VALUES[option]
    by_argument, by_context, by_recipe = given
    arguments = {option: values[0]} if by_argument else {}
    context = {"accumulation": "hopper_wgmma"}
    if by_context:
        context[option] = values[1]
    recipe = fp8.TensorScaling(**({option: values[2]} if by_recipe else {}))
    if option == "accumulation" and not by_context:
        found = requests(lambda x, w: product(x, w, recipe=recipe, **arguments), X, W)
        default = "native"
    else:
        with fp8.emulate(**context):
            found = requests(lambda x, w: product(x, w, recipe=recipe, **arguments), X, W)
        default = {"promotion_interval": 128, "split_k": 1}.get(option)
    expected = next((v for v, is_given in zip(values, given, strict=True) if is_given), default)
    assert [request[FIELDS[option]] for request in found] == [expected]


def test_none_as_an_interval_is_a_value_and_not_an_absence() -> None:
    with fp8.emulate("hopper_wgmma", promotion_interval=64):
        assert requests(product, X, W) == [("hopper_wgmma", 64, 1)]
        assert requests(lambda x, w: product(x, w, promotion_interval=None), X, W) == [
            ("hopper_wgmma", 0, 1)
        ]
    with fp8.emulate("hopper_wgmma", promotion_interval=None):
        recipe = fp8.TensorScaling(promotion_interval=64)
        assert requests(lambda x, w: product(x, w, recipe=recipe), X, W) == [("hopper_wgmma", 0, 1)]


DEFAULT_INTERVALS = {"hopper_wgmma": 128, "ada_mma": 128, "blackwell_tcgen05": 0, "fp16": 0}


@pytest.mark.parametrize("machine", DEFAULT_INTERVALS)
def test_the_models_default_interval_counts_where_nobody_gives_one(machine: str) -> None:
    expected = [(machine, DEFAULT_INTERVALS[machine], 1)]
    assert requests(lambda x, w: product(x, w, accumulation=machine), X, W) == expected
    with fp8.emulate(machine):
        assert requests(product, X, W) == expected


@pytest.mark.parametrize("option", VALUES)
def test_each_gemm_takes_its_own_value_from_the_first_who_has_one(option: str) -> None:
    first, second, third = VALUES[option]
    context: dict[str, Any] = {"accumulation": "hopper_wgmma"}
    context[option] = PerGemm(dgrad=second, wgrad=second)
    recipe = fp8.TensorScaling(**{option: PerGemm(third, third, third)})
    with fp8.emulate(**context):
        found = three(lambda x, w: product(x, w, recipe=recipe, **{option: PerGemm(wgrad=first)}))
    values = {name: request[FIELDS[option]] for name, request in found.items()}
    assert values == {"forward": third, "dgrad": second, "wgrad": first}


def test_roles_decide_which_gradient_is_which() -> None:
    models = PerGemm("hopper_wgmma", "ada_mma", "hopper_mma")
    swapped = three(lambda x, w: product(x, w, accumulation=models, roles=("weight", "input")))
    assert [request[0] for request in swapped.values()] == ["hopper_wgmma", "hopper_mma", "ada_mma"]
    inputs = three(lambda x, w: product(x, w, accumulation=models, roles=("input", "input")))
    assert [request[0] for request in inputs.values()] == ["hopper_wgmma", "ada_mma", "ada_mma"]


def test_every_public_call_takes_the_options_and_heeds_the_context() -> None:
    q, p = fp8.quantize(X), fp8.quantize(W)
    numbers = (((1,), (0,)), ((), ()))
    calls = {
        "matmul": lambda **options: fp8.matmul(X, W, **options),
        "dot_general": lambda **options: fp8.dot_general(X, W, numbers, **options),
        "einsum": lambda **options: fp8.einsum("mk,kn->mn", X, W, **options),
        "scaled_dot_general": lambda **options: fp8.scaled_dot_general(q, p, numbers, **options),
        "scaled_matmul": lambda **options: fp8.scaled_matmul(
            q.values, p.values, q.scale, p.scale, **options
        ),
    }
    options = {"accumulation": "ada_mma", "promotion_interval": 48, "split_k": 2}
    for name, call in calls.items():
        assert requests(lambda: call()) == [NATIVE], name  # noqa: B023
        assert requests(lambda: call(**options)) == [("ada_mma", 48, 2)], name  # noqa: B023
        with fp8.emulate(**options):
            assert requests(lambda: call()) == [("ada_mma", 48, 2)], name  # noqa: B023
            native = {"accumulation": "native", "split_k": 1}
            assert requests(lambda: call(**native)) == [("native", 48, 1)], name  # noqa: B023


# --- Tracing --------------------------------------------------------------------------------------


def test_a_jitted_function_is_traced_again_inside_a_context() -> None:
    traces = []

    @jax.jit
    def f(x: Any) -> Any:
        traces.append(None)
        return product(x)

    native = f(X)
    contexts = [
        {"accumulation": "hopper_wgmma"},
        {"accumulation": "hopper_wgmma", "promotion_interval": None},
        {"accumulation": "hopper_wgmma", "split_k": 2},
        {"accumulation": PerGemm(wgrad="hopper_wgmma")},
    ]
    results = []
    for _ in range(2):
        for context in contexts:
            with fp8.emulate(**context):
                results.append(np.asarray(f(X)))
    assert len(traces) == 1 + len(contexts)
    assert_same_bits(f(X), native)
    for first, second in zip(results[:4], results[4:], strict=True):
        assert_same_bits(first, second)
    assert not np.array_equal(results[0], native)
    assert_same_bits(results[3], native)


def test_a_gradient_follows_the_context_that_its_forward_call_was_traced_in() -> None:
    with fp8.emulate("hopper_wgmma", promotion_interval=None):
        y, pullback = jax.vjp(product, X, W)
        inside = jax.jit(jax.grad(lambda x, w: (product(x, w) * G).sum(), (0, 1)))(X, W)
    outside = pullback(jnp.asarray(G))
    for a, b in zip(outside, inside, strict=True):
        assert_same_bits(a, b)
    assert not np.array_equal(y, product())
    with fp8.emulate("hopper_wgmma", promotion_interval=None):
        assert_same_bits(jax.jit(lambda x, w: product(x, w))(X, W), y)


def test_a_compiled_function_keeps_its_model() -> None:
    with fp8.emulate("hopper_wgmma"):
        compiled = jax.jit(lambda x, w: product(x, w)).lower(X, W).compile()
        expected = product()
    assert_same_bits(compiled(X, W), expected)


def test_an_exported_function_keeps_its_model() -> None:
    with fp8.emulate("hopper_wgmma"):
        exported = export.export(
            jax.jit(lambda x, w: product(x, w)),
            disabled_checks=[
                export.DisabledSafetyCheck.custom_call(f"jax_fp8.{name}.v1")
                for name in ("gemm", "quantize", "quantize2")
            ],
        )(jax.ShapeDtypeStruct(X.shape, X.dtype), jax.ShapeDtypeStruct(W.shape, W.dtype))
        expected = product()
    assert_same_bits(exported.call(X, W), expected)


# --- Gradients ------------------------------------------------------------------------------------


def by_hand(recipe: fp8.Recipe, models: PerGemm[str]) -> tuple[Any, Any, Any]:
    """y, dx and dw of `X @ W` with the cotangent G, from scaled calls."""

    def dot(a: Array, b: Array, roles: str, axes: tuple[int, int], model: str) -> Any:
        sides = []
        for x, role, axis in zip((a, b), roles.split(), axes, strict=True):
            rows, k = recipe.tile(role)
            tile = (rows, k) if axis == 1 else (k, rows)
            sides.append(
                fp8.quantize(x, recipe.format(role), tile, power_of_two=recipe.power_of_two)
            )
        numbers = (((axes[0],), (axes[1],)), ((), ()))
        return fp8.scaled_dot_general(*sides, numbers, accumulation=model)

    return (
        dot(X, W, "input weight", (1, 0), models.forward),
        dot(G, W, "gradient weight", (1, 1), models.dgrad),
        dot(X, G, "input gradient", (0, 0), models.wgrad),
    )


@pytest.mark.parametrize(
    "recipe",
    [fp8.TensorScaling(), fp8.RowScaling(), fp8.BlockScaling(), fp8.MXScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize(
    "models",
    [
        PerGemm("fp32", "native", "hopper_wgmma"),
        PerGemm("hopper_wgmma", "fp32_pairwise", "native"),
        PerGemm("native", "ada_mma", "exact"),
    ],
    ids=",".join,
)
def test_gradients_are_those_of_their_own_models(recipe: fp8.Recipe, models: PerGemm[str]) -> None:
    def with_gradients(x: Any, w: Any, g: Any) -> Any:
        y, pullback = jax.vjp(lambda x, w: product(x, w, recipe=recipe, accumulation=models), x, w)
        return y, *pullback(g)

    expected = by_hand(recipe, models)
    for out in (with_gradients(X, W, G), jax.jit(with_gradients)(X, W, G)):
        for got, want in zip(out, expected, strict=True):
            assert_same_bits(got, want)
    others = by_hand(recipe, PerGemm("native", "native", "native"))
    for name, a, b in zip(models._fields, expected, others, strict=True):
        same = getattr(models, name) in ("native", "fp32")
        # 1x32 tiles end every chain before the short accumulator loses anything that shows.
        assert np.array_equal(a, b) == same or isinstance(recipe, fp8.MXScaling)


def test_a_gradient_by_mx_steps_multiplies_by_its_scales_inside() -> None:
    models = PerGemm("blackwell_tcgen05_blockscale", "blackwell_tcgen05_blockscale", "fp32")
    y, pullback = jax.vjp(
        lambda x, w: product(x, w, recipe=fp8.MXScaling(), accumulation=models), X, W
    )
    dx, _ = pullback(jnp.asarray(G))
    case = Case("blackwell_tcgen05_blockscale", 300, 70, 140)
    sides = [
        fp8.quantize(x, fmt, tile, scale_dtype=jnp.float8_e8m0fnu)
        for x, fmt, tile in ((X, "e4m3", (1, 32)), (W, "e4m3", (32, 1)))
    ]
    numbers = (((1,), (0,)), ((), ()))
    expected = fp8.scaled_dot_general(*sides, numbers, accumulation=case.machine)
    assert_same_bits(y, expected)
    g = fp8.quantize(G, "e5m2", (1, 32), scale_dtype=jnp.float8_e8m0fnu)
    w = fp8.quantize(W, "e4m3", (1, 32), scale_dtype=jnp.float8_e8m0fnu)
    numbers = (((1,), (1,)), ((), ()))
    assert_same_bits(dx, fp8.scaled_dot_general(g, w, numbers, accumulation=case.machine))


def test_second_derivatives_and_tangents_run_under_emulation() -> None:
    with fp8.emulate("hopper_wgmma"):
        x, w = X[:8, :32], W[:32, :4]

        def loss(x: Any) -> Any:
            return (product(x, w) ** 2).sum()

        _, tangent = jax.jvp(lambda x: product(x, w), (x,), (x,))
        assert np.isfinite(tangent).all()
        hessian_vector = jax.jvp(jax.grad(loss), (x,), (x,))[1]
        assert np.isfinite(hessian_vector).all()
