# SPDX-License-Identifier: Apache-2.0
"""Processes of the operating system, without torch"""
