# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration; what cannot run is refused here, by name.

settings/ has every setting once, config.py all of them; parser.py makes flags of them, validate/ completes and checks,
megatron_flags.py with its tables/ knows other programs' flags, models.py the shapes behind ``--model``.
"""
