# SPDX-License-Identifier: Apache-2.0
"""From a command line to a checked configuration.

- argv.py, parser.py: words and flags; suggest.py: what a refused command should be; foreign/: other programs' flags
- validate/: completes the configuration and refuses what cannot run; unused_flags.py: notes on flags without effect
- data_paths.py: the data flags; schedule.py: the phases of the schedule
- stages.py: layers of pipeline stages, and the formulas' view of a run
- elastic.py: the grid of --elastic; dry_run_flags.py: the flags of --dry-run
"""
