# SPDX-License-Identifier: Apache-2.0
"""The update of the weights from their gradients: clipping, AdamW and Muon."""
