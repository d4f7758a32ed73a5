# SPDX-License-Identifier: Apache-2.0
"""What torch's own parallelism does to a model: names under wrappers, shards of parameters, compiled modules."""
