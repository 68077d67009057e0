"""The kernel rows that tests run over."""

from jax_fp8 import lowering


def runnable_rows(operation: str) -> list[str]:
    """Names of the rows of `operation` that this machine can run, in order of preference.

    Without those that add up in an order of their own: test_amx.py is about them.
    """
    return [
        row.name
        for row in lowering.kernel_table()
        if row.operation == operation and not row.why_not and not row.unless_asked
    ]
