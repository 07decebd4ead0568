#!/bin/sh
# Several machines: run this on each of them, with the same HEAD (one of the machines) and the same JOB. OUT is on a disk
# that all of them share. With NODES=1:4, one to four machines take part: if one is lost, the others start again
# without it, and with it when it is back.
#
#     HEAD=node-0 JOB=mine NODES=1:4 OUT=/shared/runs/mine recipes/cluster/nodes.sh
set -eu
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280  # seconds in which a step may end after a signal
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-gpu}" --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29400}" --rdzv-id "${JOB:-operant}" \
    -m operant train "${RECIPE:-sentiment}" --out "${OUT:-runs/cluster}" --resume-if-there \
    --parallel "${PARALLEL:-fsdp}" --checkpoint-minutes "${MINUTES:-10}" "$@"
