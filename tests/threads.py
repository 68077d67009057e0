"""Running a piece of a test in processes whose XLA has another number of threads."""

import os
import subprocess
import sys


def digest_with_threads(module: str, num_threads: int) -> str:
    """What `digest_of_results()` of a test module returns in a process of its own."""
    # XLA's pool has as many threads as the larger of PJRT_NPROC and the number of devices.
    environment = os.environ | {
        "PJRT_NPROC": str(num_threads),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    script = f"import {module}; print({module}.digest_of_results())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=os.path.dirname(__file__),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
