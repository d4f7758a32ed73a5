# SPDX-License-Identifier: Apache-2.0
"""Freed tensors' memory is kept: making them again touches no fresh pages."""

import os
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, torch
from megatron.platform.host_memory import OWN_SETTINGS, keep_freed_memory
took_effect = keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**26).zero_()  # 256 MiB, 65536 pages of 4 KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first, *others = [faults() for _ in range(4)]
print(took_effect, max(others))
"""


def run(**environment: str) -> list[str]:
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    } | environment
    answer = subprocess.run([sys.executable, "-c", COUNT_FAULTS], env=env, capture_output=True, text=True, check=True)
    return answer.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_used_again():
    took_effect, faults = run()
    if took_effect == "False":
        pytest.skip("this C library cannot")
    assert int(faults) < 500, faults


def test_allocator_settings_of_the_user_stay():
    assert run(MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
