# SPDX-License-Identifier: Apache-2.0
"""From files of text to the batches of a step: tokenizers, .bin/.idx files, an order that no grid changes."""
