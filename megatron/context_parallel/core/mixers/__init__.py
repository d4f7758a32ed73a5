# SPDX-License-Identifier: Apache-2.0
"""Layers beside core's attention: multi-latent attention, and Gated DeltaNet and Mamba2, which carry a state"""
