#!/bin/sh
# A job on a running Ray cluster: one process trains, and ACTORS actors on other machines generate its replies, one step
# ahead. An actor that dies is started again; if the training process dies, the same command goes on.
#
#     RAY_ADDRESS=http://head:8265 ACTORS=8 OUT=/shared/runs/mine recipes/cluster/ray-job.sh
set -eu
exec ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" -- \
    operant train "${RECIPE:-sentiment}" --out "${OUT:-runs/cluster}" --resume-if-there \
    --engine ray --engine.address auto --engine.actors "${ACTORS:-2}" --engine.gpus "${GPUS:-1}" \
    --rollouts-ahead "${AHEAD:-1}" "$@"
