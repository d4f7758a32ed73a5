# SPDX-License-Identifier: Apache-2.0
"""Features that the training loop calls and that can be read alone: saving, stopping, and what watches over a run."""
