"""Oracles and checks for tests of FP8 code: the independent NumPy quantiser and GEMM."""
