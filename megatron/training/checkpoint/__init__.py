# SPDX-License-Identifier: Apache-2.0
"""Save and load: any grid writes, any grid reads; Megatron-LM's as well, both ways (megatron_lm/), and its older forms
(convert/); Hugging Face's, both ways (hugging_face/).
"""
