# SPDX-License-Identifier: Apache-2.0
"""An engine for verl, which finds it by the entry point ``verl.plugins``.

    pip install ./integrations/verl
    ... engine._target_=longcontext_verl.LongContextEngineConfig +engine.ring_parallel_size=4

engine.py is the engine, config.py its settings, cpu_platform.py lets verl run without a GPU, for tests.
"""

from importlib.metadata import version

from longcontext_verl import cpu_platform  # noqa: F401
from longcontext_verl.config import LongContextEngineConfig

VERL = "0.9.1"
if version("verl") != VERL:
    raise ImportError(f"verl {version('verl')} is not the version that this engine was tested with: {VERL}")

from longcontext_verl.engine import LongContextEngine, LongContextValueEngine  # noqa: E402

__all__ = ["LongContextEngine", "LongContextEngineConfig", "LongContextValueEngine"]
