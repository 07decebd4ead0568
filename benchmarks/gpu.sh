#!/bin/sh
# Everything that needs a GPU, in at most ten minutes, on a bare CUDA machine: Python with PyTorch and transformers,
# no network, nothing installed. Results: benchmarks/results/gpu.json, written after every part.
#
#     benchmarks/gpu.sh                             all of it
#     benchmarks/gpu.sh --only decode,flops         some parts
#     benchmarks/gpu.sh --tiny                      every path with tiny models, on a CPU too
#     OPERANT_PEER_WHEELS=dir benchmarks/gpu.sh     with TRL beside it, from wheels in that folder
#     PYTHON=python3.12 benchmarks/gpu.sh           with that Python
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TRANSFORMERS_VERBOSITY=error PYTHONUNBUFFERED=1
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
