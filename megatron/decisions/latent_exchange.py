# SPDX-License-Identifier: Apache-2.0
EXCHANGED = ("auto", "keys", "latents")
