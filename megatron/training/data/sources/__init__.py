# SPDX-License-Identifier: Apache-2.0
"""Where rows of text come from, and how they become token files in several parts.

- remote.py: files behind a URL; columnar.py: Parquet, Arrow, saved folders of datasets; tar_files.py: WebDataset
- filters.py: which rows are kept
- partitions.py: parts of the input, each written with its checksums; token_files.py: merges, splits, checks
"""
