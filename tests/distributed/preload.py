# SPDX-License-Identifier: Apache-2.0
"""What the fork server of the pool imports once, for all workers: add here what many distributed tests import."""

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels on CPU tensors; Triton looks when it is first imported

import einops  # noqa: F401
import megatron.core.dist_checkpointing.exchange_utils  # noqa: F401
import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
import torch.distributed.checkpoint.filesystem  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
import torch.testing  # noqa: F401

import megatron.context_parallel  # noqa: F401
import megatron.context_parallel.huggingface  # noqa: F401
import megatron.training.arguments.parser  # noqa: F401
import megatron.training.loop  # noqa: F401
import tests.distributed.training_runs  # noqa: F401

gc.collect()
gc.freeze()  # the workers share these pages, and the collection after each job does not walk through them
