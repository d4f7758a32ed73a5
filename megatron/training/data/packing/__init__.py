# SPDX-License-Identifier: Apache-2.0
"""Which documents share a sample, and how often a document of some length is read.

- packing_plans.py: best-fit and by-work packing, and what a packing costs
- length_mixtures.py: blends by source and length in a YAML file
"""
