#!/usr/bin/env bash
# The tiny twin of a launch script on CPU ranks of this machine (gloo), with the same flags; a few minutes.
# usage: launch/cpu_smoke.sh glm52|qwen36 [options of the launch scripts]      (--help lists them)
# Without --rollouts it makes a small file of groups, and without --output a folder; both are temporary and named.
# shellcheck disable=SC2034 # read by launch
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=${1:-}
case $model in
glm52) layout="tp 2, ep 2" ;;
qwen36) layout="tp 2" ;;
--help | -h) model=glm52 layout="tp 2" && set -- glm52 --help ;;
*) fail "needs glm52 or qwen36 first, got '$model': launch/cpu_smoke.sh glm52" ;;
esac
shift
config=examples/$model/tiny.yaml
gpus=0 ranks=2 base_nodes=1 fallback_tokenizer=bytes

given=" $* "
given=${given%% -- *}
if [[ $given != *" --rollouts"* || $given != *" --output"* ]] && [[ $given != *" --help "* ]]; then
    scratch=$(mktemp -d)
    printf '%s: files of this run are in %s\n' "$script" "$scratch" >&2
    if [[ $given != *" --output"* ]]; then set -- --output "$scratch/run" "$@"; fi
    if [[ $given != *" --rollouts"* ]]; then
        set -- --rollouts "$scratch/groups.jsonl" "$@"
        prompt=$(printf 'def f%d(x): return x; ' {1..30})
        for group in 1 2; do
            printf '{"group_id": "%s", "prompt": "%s", "responses": [{"text": "f1(2) == 2", "reward": 1.0}, {"text": "f2(%s)", "reward": 0.0}]}\n' \
                "smoke-$group" "$prompt" "$group"
        done >"$scratch/groups.jsonl"
    fi
fi
launch "$@"
