#!/usr/bin/env bash
# GLM-5.2 on 4 nodes of 8 GPUs: TP8 x PP4 x EP8, over torchrun; launch/glm52_32gpu.sh --help
# shellcheck disable=SC2034 # read by launch
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

config=examples/glm52/glm52_32gpu.yaml
layout="tp 8 x pp 4, ep 8"
gpus=8 ranks=8 base_nodes=4
launch "$@"
