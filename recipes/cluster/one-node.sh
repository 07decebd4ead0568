#!/bin/sh
# One machine: a rank for each of its GPUs, or RANKS processes. A rank that dies ends the step; torchrun starts the
# ranks again, at most RESTARTS times, and the same command then goes on from the last checkpoint.
#
#     RECIPE=sentiment OUT=runs/mine recipes/cluster/one-node.sh --steps 50
set -eu
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds in which a step may end after a signal
exec torchrun --standalone --nproc-per-node "${RANKS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    -m operant train "${RECIPE:-sentiment}" --out "${OUT:-runs/cluster}" --resume-if-there \
    --parallel "${PARALLEL:-fsdp}" --checkpoint-minutes "${MINUTES:-10}" "$@"
