# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration; what cannot run is refused here, by name.

settings/ defines each setting once and config.py collects them; parser.py makes flags of them; validate/ completes and
checks them; foreign/ knows the flags of other programs; models.py has the shapes behind ``--model``.
"""
