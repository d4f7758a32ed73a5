# SPDX-License-Identifier: Apache-2.0
"""Single changes of the source that the tests must notice: ``python -m tests.mutants --help``."""
