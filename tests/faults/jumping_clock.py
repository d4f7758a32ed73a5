# SPDX-License-Identifier: Apache-2.0
"""The training program under a clock that jumps by up to ten years, back and forth, whenever it is read."""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    from megatron.training.pretrain import main as program
    from megatron.training.settings.models import LLAMA_DEFAULTS

    clock, draw = time.time, random.Random(0)
    time.time = lambda: clock() + draw.uniform(-3e8, 3e8)
    time.time_ns = lambda: int(time.time() * 1e9)
    return program(sys.argv[1:], LLAMA_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
