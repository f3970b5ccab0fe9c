#!/usr/bin/env bash
# Qwen3.6-27B on one node of 8 GPUs: TP8, over torchrun; launch/qwen36_8gpu.sh --help
# shellcheck disable=SC2034 # read by launch
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

config=examples/qwen36/qwen36_8gpu.yaml
layout="tp 8"
gpus=8 ranks=8 base_nodes=1
launch "$@"
