# perfsearch and what its searches need, from this tree.
#
#   docker build -t perfsearch .
#   docker build -t perfsearch --build-arg BASE=pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" perfsearch runner=ddp strategy=bayes
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" --entrypoint perfsearch-run perfsearch \
#     --search train.py --lr 1e-3
#
# BASE needs Python 3.11 to 3.13. Its torch is kept; where it has none, one is installed.
ARG BASE=python:3.12-slim
FROM ${BASE}

# Extras of pyproject.toml, separated by commas.
ARG EXTRAS=soap
# Where torch comes from; empty: from where pip takes everything. One with builds for the CPU makes a
# far smaller image.
ARG TORCH_INDEX=

# torch.compile needs a compiler, and `perfsearch compare` of two commits needs git.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/perfsearch
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY conf conf
COPY perfsearch perfsearch
RUN grep -v '^torch==' constraints.txt > tested.txt
RUN python -c 'import torch' || pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
RUN pip install --no-cache-dir -c tested.txt ".[$EXTRAS]"

WORKDIR /work
ENTRYPOINT ["perfsearch"]
