# SPDX-License-Identifier: Apache-2.0
"""Chats to fine-tune on (--sft): read and checked, rendered by the tokenizer's template, packed into samples."""
