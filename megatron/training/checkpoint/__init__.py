# SPDX-License-Identifier: Apache-2.0
"""Save and load: any grid writes, any grid reads; and Hugging Face's form, both ways (hugging_face/)."""
