# SPDX-License-Identifier: Apache-2.0
"""What a stranger's folder may ask for: the largest numbers of its settings, and links that stay in it."""
