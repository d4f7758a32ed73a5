# SPDX-License-Identifier: Apache-2.0
"""Makes a small program of a training command for ``cp.certify``: its flags, with a small model of the same kind."""
