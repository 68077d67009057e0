"""The machine's own peaks, and the kernel row that is preferred for the faster of two."""

from __future__ import annotations

import pytest

from jax_fp8 import _ffi, lowering
from jax_fp8.bench import peaks


def test_every_peak_is_measured_or_says_why_not():
    names = []
    for name, unit, instruction, why_not in _ffi.peaks():
        assert instruction
        names.append(name)
        if why_not:
            with pytest.raises(ValueError, match=name):
                _ffi.measure_multiply(name, 0.0)
        elif unit == "FLOP":
            flops, seconds = _ffi.measure_multiply(name, 1e-4)
            assert flops / seconds > 1e6
        else:
            assert _ffi.ReadBuffer(4096, True).read(name, 0, 4096) >= 0
    assert {"scalar", "read_scalar"} <= set(names)
    assert set(peaks.PEAK_OF_ROW.values()) <= set(names)


def test_every_gemm_row_has_the_peak_of_its_instruction():
    for row in lowering.kernel_table():
        if row.operation == "gemm":
            assert row.name in peaks.PEAK_OF_ROW


@pytest.mark.parametrize(("first", "count"), [(1, 512), (0, 100), (0, 4 << 20), (-512, 512)])
def test_reads_outside_of_the_buffer_are_refused(first, count):
    buffer = _ffi.ReadBuffer(1 << 20, False)
    assert buffer.size_bytes == 2 << 20
    with pytest.raises(ValueError, match="no multiples of 512"):
        buffer.read("read_scalar", first, count)


def test_what_is_no_peak_is_refused():
    with pytest.raises(ValueError, match="no peak 'vpmull' that counts FLOPs"):
        _ffi.measure_multiply("vpmull", 0.0)
    with pytest.raises(ValueError, match="no peak 'scalar' that counts bytes"):
        _ffi.ReadBuffer(512, False).read("scalar", 0, 512)
    with pytest.raises(ValueError, match="at least one byte"):
        _ffi.ReadBuffer(0, False)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_measure_together(threads):
    (scalar,) = peaks.multiply_peaks(threads, seconds=1e-3, repeats=2, names=["scalar"])
    assert len(scalar.rates) == 2
    assert scalar.rate == max(scalar.rates) > 0
    readers = peaks.Readers(64 << 10, 1 << 20, threads)
    assert (readers.piece_bytes, readers.num_pieces) == (64 << 10, 16)
    assert readers.bandwidth(repeats=3).rate > 0
    readers.close()


def test_the_row_of_the_faster_instruction_comes_first():
    rows = {row.name: row for row in lowering.kernel_table() if row.operation == "gemm"}
    pair = [rows[name] for name in ("avx512bf16", "avx512vbmi")]
    if any(row.why_not for row in pair):
        assert list(rows).index("avx512bf16") < list(rows).index("avx512vbmi")
        return
    rates = {
        peak.name: peak.rate
        for peak in peaks.multiply_peaks(1, seconds=0.005, names=["avx512bf16", "avx512"])
    }
    quotient = rates["avx512"] / rates["avx512bf16"]
    if not 0.9 < quotient < 1.6:  # nearer to 1.2 either may be first
        first = "avx512vbmi" if quotient > 1 else "avx512bf16"
        other = "avx512bf16" if quotient > 1 else "avx512vbmi"
        assert list(rows).index(first) < list(rows).index(other)
