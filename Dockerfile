# SPDX-License-Identifier: Apache-2.0
# The GPU environment: NVIDIA's PyTorch image, with its own torch, Transformer Engine and flash-attn left as they are.
#
#   docker build -t megatron-longcontext .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --rm -it -v /data:/data megatron-longcontext
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}

WORKDIR /workspace/megatron-longcontext
COPY . .

# The image's own list of pins is set aside for ours, which has one line: keep the torch that is there.
RUN python3 -c "import torch; print('torch==' + torch.__version__)" > /tmp/constraints.txt \
    && PIP_CONSTRAINT= pip install --no-cache-dir --no-build-isolation -c /tmp/constraints.txt ".[test]" \
    && rm -rf build ./*.egg-info \
    && python3 -c "import megatron.core, megatron.context_parallel"

CMD ["bash"]
