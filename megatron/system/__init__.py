# SPDX-License-Identifier: Apache-2.0
"""Processes and files of the operating system, without torch"""
