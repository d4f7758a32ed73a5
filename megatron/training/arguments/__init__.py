# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration.

settings/ defines each setting once, config.py collects them, parser.py makes flags of them, validate/ completes them
and refuses what cannot run, foreign/ knows the flags of other programs, models.py has the shapes of ``--model``.
"""
