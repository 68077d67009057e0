"""The table of kernel rows: each row runs, or says why it does not."""

import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8 import lowering
from jax_fp8.lowering import KernelRow
from rows import runnable_rows

every_row = pytest.mark.parametrize(
    "row", lowering.kernel_table(), ids=lambda row: f"{row.operation}-{row.name}"
)


def test_every_operation_has_a_row_that_runs_anywhere() -> None:
    for operation in ("gemm", "emulate", "quantize"):
        rows = [row for row in lowering.kernel_table() if row.operation == operation]
        assert rows[-1] == KernelRow(operation, "scalar", "")
        assert len({row.name for row in rows}) == len(rows)


def test_the_readable_row_is_never_preferred_to_another_that_runs() -> None:
    for operation in ("gemm", "emulate", "quantize"):
        rows = [row for row in lowering.kernel_table() if row.operation == operation]
        assert [row.name for row in rows].index("scalar") == len(rows) - 1


@every_row
def test_row_runs_or_says_why_not_in_a_sentence(row: KernelRow) -> None:
    x = jnp.full((3, 5), 7.0)  # scale 2^-6: the result is exact
    if not row.why_not:
        with fp8.force_kernel(row.name):
            assert fp8.matmul(x, x.T).tolist() == [[245.0] * 3] * 3
        return
    assert len(row.why_not.split()) > 2
    with fp8.force_kernel(row.name), pytest.raises(Exception, match=row.why_not):
        fp8.matmul(x, x.T)


def test_a_kernel_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="no kernel 'avx1024'.*scalar"):
        fp8.force_kernel("avx1024")


def test_an_unforced_call_takes_the_first_row_that_accepts() -> None:
    rows = [row.name for row in lowering.kernel_table() if row.operation == "gemm"]
    runnable = runnable_rows("gemm")
    choice = fp8.explain(jnp.ones((3, 5)), jnp.ones((5, 4))).gemms[0]
    assert choice.kernel == runnable[0]
    assert {name for name, _ in choice.refusals} == set(rows) - {choice.kernel}
