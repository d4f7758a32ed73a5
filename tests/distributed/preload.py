# SPDX-License-Identifier: Apache-2.0
"""Imported once by the pool's fork server, for all workers. Add modules that many distributed tests import."""

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels on CPU tensors; Triton reads it at its first import

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
gc.freeze()  # the workers share these pages, and garbage collection after each job skips them
