# SPDX-License-Identifier: Apache-2.0
"""From files of text to the batches of a step: tokenizers, .bin/.idx files, an order that is the same on every grid.

- text_files.py, row_files.py: files of texts and of chats; encoding.py: from texts to ids; tokenizer.py
- index_files.py, read_tokens.py: .bin/.idx files; genome.py: codons
- sources/: files of rows, parts of the input; packing/: which documents share a sample
- samples/, datasets.py: samples and their order; chat_dataset.py, chat_template.py: the same for --sft
- batches.py: the batch of a step, and each rank's part of it
"""
