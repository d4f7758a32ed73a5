# SPDX-License-Identifier: Apache-2.0
"""Forty right programs as strangers write them, none of which certify may accuse, and forty errors that it must place.

python -m tests.referee                       # all, with a table of what certify says
python -m tests.referee --only ring           # programs and errors whose name contains this
"""
