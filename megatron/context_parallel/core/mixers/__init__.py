# SPDX-License-Identifier: Apache-2.0
"""Layers beside core's attention: multi-latent attention, and Gated DeltaNet, which carries a state"""
