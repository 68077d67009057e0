"""Command line: `python -m jax_fp8 info`, `explain`, `emulate`, `gradcheck` and `diagnose`.

Tables on a terminal, JSON where the output is piped. The exit status says success.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jaxlib.version
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_fp8
from jax_fp8 import _compat, _ffi, dispatch, formats, lowering, recipes
from jax_fp8.bench import command as bench_command
from jax_fp8.diagnosis import command as diagnosis_command
from jax_fp8.emulation import command as emulation_command
from jax_fp8.testing import command as gradcheck_command


def info(arguments: argparse.Namespace) -> dict[str, Any]:
    """Versions, formats and kernels of this installation."""
    built, runtime = _ffi.ffi_api_version(), _compat.runtime_ffi_api_version()
    return {
        "versions": {
            "jax_fp8": jax_fp8.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "XLA FFI API, built with": "{}.{}".format(*built),
            "XLA FFI API, of jaxlib": "{}.{}".format(*runtime),
            "platform of jax": jax.default_backend(),
        },
        "formats": [
            {
                "format": fmt.name,
                "dtype": fmt.dtype.name,
                "max": fmt.max,
                "smallest normal": fmt.smallest_normal,
                "smallest subnormal": fmt.smallest_subnormal,
                "infinity": fmt.has_inf,
            }
            for fmt in formats.ALL
        ],
        "kernels": [
            {
                "operation": row.operation,
                "kernel": row.name,
                "platform": "cpu",
                "why not": row.why_not or row.unless_asked,
            }
            for row in lowering.kernel_table()
        ],
    }


def explain(arguments: argparse.Namespace) -> dict[str, Any]:
    """Which kernel takes each GEMM of `dot_general` on an (m, k) and a (k, n) operand."""
    m, n, k = arguments.shape
    rhs_shape, rhs_k = ((n, k), 1) if arguments.rhs == "nk" else ((k, n), 0)
    found = dispatch.explain(
        jax.ShapeDtypeStruct((m, k), arguments.dtype),
        jax.ShapeDtypeStruct(rhs_shape, arguments.dtype),
        (((1,), (rhs_k,)), ((), ())),
        recipe=recipes.BY_NAME[arguments.recipe],
        platform=arguments.platform,
    )
    return {
        "platform": found.platform,
        "recipe": arguments.recipe,
        "gemms": [dataclasses.asdict(choice) for choice in found.gemms],
    }


def _show_info(console: Console, result: dict[str, Any]) -> None:
    versions = Table("what", "version", title="versions")
    for name, version in result["versions"].items():
        versions.add_row(name, version)
    console.print(versions)
    for title in ("formats", "kernels"):
        console.print(_table(title, result[title]))


def _show_explain(console: Console, result: dict[str, Any]) -> None:
    console.print(f"platform {result['platform']}, recipe {result['recipe']}")
    rows = []
    for choice in result["gemms"]:
        refusals = "\n".join(f"{row}: {reason}" for row, reason in choice["refusals"])
        rows.append(
            {
                "GEMM": choice["name"],
                "request": choice["request"],
                "kernel": choice["kernel"],
                "not": refusals,
            }
        )
    console.print(_table("kernels by GEMM", rows))


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 3 or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not three sizes m,n,k such as 64,512,128")
    return sizes


def _add_explain_arguments(explains: argparse.ArgumentParser) -> None:
    explains.add_argument("--shape", type=_shape, required=True, metavar="M,N,K")
    explains.add_argument("--recipe", choices=tuple(recipes.BY_NAME), default="block")
    explains.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="dtype of the operands and of the result",
    )
    explains.add_argument(
        "--rhs", choices=("kn", "nk"), default="kn", help="order of the dims of rhs in memory"
    )
    explains.add_argument("--platform", choices=("cpu", "cuda", "rocm"))


class Command(NamedTuple):
    """One word of the command line.

    Attributes:
      compute: what it does, and the result as JSON; sentences in its "failures" are a failure.
      show: prints the result on a terminal.
      add_arguments: declares its options. `arguments.fail(message)` refuses their values.
    """

    compute: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[Console, dict[str, Any]], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None


COMMANDS: Final[dict[str, Command]] = {
    "info": Command(info, _show_info),
    "explain": Command(explain, _show_explain, _add_explain_arguments),
    "bench": Command(bench_command.bench, bench_command.show, bench_command.add_arguments),
    "emulate": Command(
        emulation_command.emulate, emulation_command.show, emulation_command.add_arguments
    ),
    "gradcheck": Command(
        gradcheck_command.gradcheck,
        gradcheck_command.show,
        functools.partial(gradcheck_command.add_arguments, recipes=recipes.BY_NAME),
    ),
    "diagnose": Command(
        diagnosis_command.diagnose, diagnosis_command.show, diagnosis_command.add_arguments
    ),
}


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    json_help = "print JSON on a terminal too"
    root = argparse.ArgumentParser(prog="python -m jax_fp8", description=__doc__)
    root.add_argument("--json", action="store_true", help=json_help)
    commands = root.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        doc = command.compute.__doc__
        own = commands.add_parser(name, help=doc, description=doc)
        command.add_arguments(own)
        # Not stored where it is missing, so that it does not undo the one before the command.
        own.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=json_help)
        own.set_defaults(fail=own.error)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = parser().parse_args(argv)
    command = COMMANDS[arguments.command]
    result = command.compute(arguments)
    try:
        if arguments.json or not sys.stdout.isatty():
            print(json.dumps(result, indent=2), flush=True)
        else:
            command.show(Console(), result)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    failures = result.get("failures", ())
    for sentence in failures:
        print(sentence, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
