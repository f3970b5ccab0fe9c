#!/usr/bin/env bash
# The tiny twin of a launch script on CPU ranks of this machine (gloo), with the same flags; a few minutes.
# usage: launch/cpu_smoke.sh glm52|qwen36 [options of the launch scripts]      (--help lists them)
# Without --rollouts it takes two small groups of this project's, and without --output a temporary folder, which it names.
# shellcheck disable=SC2034 # read by launch
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

model=${1:-}
case $model in
glm52) layout="tp 2, ep 2" ;;
qwen36) layout="tp 2" ;;
--help | -h) model=glm52 layout="tp 2" && set -- glm52 --help ;;
*) fail "needs glm52 or qwen36 first, got '$model': launch/cpu_smoke.sh glm52" ;;
esac
shift
config=examples/$model/tiny.yaml
gpus=0 ranks=2 base_nodes=1 fallback_tokenizer=bytes fallback_rollouts=$checkout/examples/smoke.jsonl fallback_output=1
launch "$@"
