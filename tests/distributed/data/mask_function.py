# SPDX-License-Identifier: Apache-2.0
"""A mask as a user would write it: itself, and every third token before."""


def every_third(q, k):
    return (q - k) % 3 == 0
