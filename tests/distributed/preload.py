# SPDX-License-Identifier: Apache-2.0
"""What the fork server of the pool imports once, for all workers: add here what many distributed tests import."""

import gc

import megatron.core  # noqa: F401
import megatron.core.distributed  # noqa: F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
import megatron.core.models.gpt.gpt_model  # noqa: F401
import megatron.core.optimizer  # noqa: F401
import megatron.core.pipeline_parallel  # noqa: F401
import torch.distributed  # noqa: F401
import torch.testing  # noqa: F401

gc.collect()
gc.freeze()  # the workers share these pages, and the collection after each job does not walk through them
