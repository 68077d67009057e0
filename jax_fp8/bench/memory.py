"""How much memory there is, and how much a call takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["available_bytes", "call_bytes", "last_level_cache_bytes", "peak_rss_bytes"]

_PROC: Final = Path("/proc")

_peaks_before_resets: list[int] = []


def available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    return _kilobytes(_PROC / "meminfo", "MemAvailable")


def last_level_cache_bytes() -> int | None:
    """Size of the third-level cache, or None where the system does not say."""
    name = "SC_LEVEL3_CACHE_SIZE"
    known = hasattr(os, "sysconf") and name in os.sysconf_names
    return (os.sysconf(name) if known else 0) or None


def peak_rss_bytes() -> int | None:
    """Largest resident memory of this process so far, or None where the system does not say."""
    now = _peak_since_reset()
    return None if now is None else max(now, *_peaks_before_resets, 0)


def _peak_since_reset() -> int | None:
    return _kilobytes(_PROC / "self" / "status", "VmHWM")


def call_bytes(call: Callable[[], Any]) -> int | None:
    """Resident memory that a call takes at its peak beyond what there was before it.

    Returns:
      Bytes: the result and what is temporary, on the second call, so that nothing is counted that
      a first call sets up. None where the system cannot tell.
    """
    call()
    _peaks_before_resets.append(_peak_since_reset() or 0)
    try:  # "5" sets the peak back to what is resident now (proc(5))
        (_PROC / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    before = _kilobytes(_PROC / "self" / "status", "VmRSS")
    call()
    peak = _peak_since_reset()
    return None if before is None or peak is None else max(0, peak - before)


def _kilobytes(path: Path, field: str) -> int | None:
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return 1024 * int(match.group(1)) if match else None
