# SPDX-License-Identifier: Apache-2.0
"""The training program, with an index of data that takes long to build: ``slow_start.py MARK FLAGS...``.

The file MARK appears when the first of the index's files is written.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> int:
    import numpy as np

    from megatron.training.pretrain import main as program
    from megatron.training.settings.models import LLAMA_DEFAULTS

    save, mark = np.save, Path(sys.argv[1])

    def save_slowly(*args, **more):
        save(*args, **more)
        mark.touch()
        time.sleep(0.0 if os.environ.get("QUICK") else 60.0)

    np.save = save_slowly
    return program(sys.argv[2:], LLAMA_DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
