# SPDX-License-Identifier: Apache-2.0
"""Programs for ``cp.certify``: a training command, a model of transformers, a file's function."""
