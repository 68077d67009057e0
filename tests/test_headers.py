"""C++ headers: what a linker would merge without a word."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

FFI = Path(__file__).parent.parent / "ffi"
#: Functions at namespace level that several files may define: the linker keeps one of each name.
INLINE = re.compile(r"^(?:inline|constexpr) [\w:<>&* ]*?(\w+)\(", re.MULTILINE)


def test_no_inline_function_has_two_definitions() -> None:
    found = defaultdict(set)
    for header in sorted(FFI.rglob("*.h")):
        text = header.read_text(encoding="utf-8")
        if "namespace {" in text:  # local to the file that includes it
            continue
        for name in INLINE.findall(text):
            found[name].add(str(header.relative_to(FFI)))
    assert found["CeilDiv"] == {"common/ceil_div.h"}
    assert {name: headers for name, headers in found.items() if len(headers) > 1} == {}
