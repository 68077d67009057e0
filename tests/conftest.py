"""What every test runs under: four CPU devices, and kernels required.

The environment is set before anything imports jax, which reads it once.
"""

import os
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_FP8_REQUIRE_KERNEL"] = "1"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()

import hypothesis
import jax
import pytest

from rows import runnable_rows

_QUIET = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
#: The same cases in every run. HYPOTHESIS_PROFILE=explore looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, **_QUIET)
hypothesis.settings.register_profile("explore", print_blob=True, **_QUIET)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session", params=runnable_rows("gemm"))
def kernel_row(request: pytest.FixtureRequest) -> str:
    """Name of a GEMM row, for `jax_fp8.force_kernel`."""
    return request.param


@pytest.fixture(scope="session", params=runnable_rows("emulate"))
def emulate_row(request: pytest.FixtureRequest) -> str:
    """Name of a row that emulates accumulators, for `jax_fp8.force_kernel`."""
    return request.param


@pytest.fixture(scope="session", params=runnable_rows("quantize"))
def quantize_row(request: pytest.FixtureRequest) -> str:
    """Name of a quantiser row, for `jax_fp8.force_kernel`."""
    return request.param


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types, as a user may have switched on."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
