# Shared by the launch scripts, which source it: options, checks of this machine, and the start of torchrun.
# A script sets config (relative to the checkout), layout (in words), gpus (of a node; 0 for CPU ranks), ranks (of a
# node) and base_nodes (what the layout needs; a multiple of it is data parallel), then calls: launch "$@"
# shellcheck shell=bash disable=SC2154

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
script=${0##*/}

fail() {
    printf '%s: error: %s\n' "$script" "$1" >&2
    exit 2
}

usage() {
    cat <<END
usage: launch/$script ${model:+glm52|qwen36 }--rollouts FILE --output DIR [options] [-- options of longstraw train]

Trains $config ($layout) on $base_nodes x $ranks ranks, or on a multiple of $base_nodes nodes.
Run it once on each node; launch/slurm.sh does that under Slurm.

  --rollouts FILE     rollout groups (JSONL); every node reads it
  --output DIR        folder for metrics.jsonl and weights/, shared by all nodes
  --weights DIR       HuggingFace folder (safetensors) to start from; by default weights are drawn from the seed
  --tokenizer PATH    tokenizer.json or its folder, or "bytes" (default: $default_tokenizer)
  --nnodes N          nodes of the run (default $base_nodes)
  --node-rank R       which of them this is, from 0 (needed where there are several)
  --master-addr HOST  where node 0 listens (needed where there are several)
  --master-port PORT  its port (default 29500)
  --python PATH       Python with this project in it (default: .venv of the checkout, else python3)
  --print             show the command of this node, start nothing, and check no files or GPUs
  --help              this text

Ctrl-C, or SIGTERM to this script, ends the run after its current step, with the weights saved; twice ends it at once.
END
}

# Options, each with a value in the next argument or behind "=", into variables of their names; the rest into extra.
parse() {
    rollouts='' output='' weights='' tokenizer='' nnodes=$base_nodes node_rank='' master_addr='' master_port=29500
    python='' print_only='' extra=()
    while [ $# -gt 0 ]; do
        case $1 in
        --rollouts | --output | --weights | --tokenizer | --nnodes | --node-rank | --master-addr | --master-port | --python)
            if [ $# -lt 2 ] || [ -z "$2" ]; then fail "$1 needs a value"; fi
            local name=${1#--}
            printf -v "${name//-/_}" '%s' "$2"
            shift 2
            ;;
        --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
        --print) print_only=1 && shift ;;
        --help | -h) usage && exit 0 ;;
        --) extra=("${@:2}") && break ;;
        *) fail "unknown argument $1: see --help; options of longstraw train go behind --" ;;
        esac
    done
}

check_options() {
    if [ -z "$rollouts" ]; then fail "--rollouts FILE is missing"; fi
    if [ -z "$output" ]; then fail "--output DIR is missing"; fi
    if [ -z "$tokenizer" ]; then tokenizer=${weights:-$fallback_tokenizer}; fi
    if [ -z "$tokenizer" ]; then fail "--weights DIR or --tokenizer PATH is missing: the text of rollouts needs a tokenizer"; fi
    whole_number --nnodes "$nnodes"
    if [ "$nnodes" -lt 1 ] || [ $((nnodes % base_nodes)) -ne 0 ]; then
        fail "--nnodes $nnodes: needs a multiple of $base_nodes nodes of $ranks ranks ($layout)"
    fi
    if [ "$nnodes" -gt 1 ]; then
        if [ -z "$node_rank" ]; then fail "--node-rank is missing: which of the $nnodes nodes this is, from 0"; fi
        if [ -z "$master_addr" ]; then fail "--master-addr is missing: the host of node 0"; fi
    fi
    node_rank=${node_rank:-0} master_addr=${master_addr:-127.0.0.1}
    whole_number --node-rank "$node_rank"
    whole_number --master-port "$master_port"
    if [ "$node_rank" -ge "$nnodes" ]; then fail "--node-rank $node_rank: needs 0 to $((nnodes - 1)), for $nnodes nodes"; fi
}

whole_number() {
    case $2 in '' | 0?* | *[!0-9]*) fail "$1 $2: needs a whole number" ;; esac
}

find_python() {
    if [ -z "$python" ]; then
        python=$checkout/.venv/bin/python
        if [ ! -x "$python" ]; then python=python3; fi
    fi
}

# What ranks would find out one by one, minutes later.
check_machine() {
    [ -f "$checkout/$config" ] || fail "$checkout/$config: no such file; the checkout is not whole"
    [ -f "$rollouts" ] || fail "--rollouts $rollouts: no such file on this node ($HOSTNAME)"
    if [ -n "$weights" ]; then
        [ -d "$weights" ] || fail "--weights $weights: no such folder on this node ($HOSTNAME)"
        compgen -G "$weights/*.safetensors" >/dev/null || fail "--weights $weights: has no .safetensors file"
    fi
    [ "$tokenizer" = bytes ] || [ -e "$tokenizer" ] ||
        fail "--tokenizer $tokenizer: no such file or folder on this node ($HOSTNAME)"
    local found
    # the package's own torch, which honours CUDA_VISIBLE_DEVICES, as the ranks will
    found=$("$python" -c 'import megatron_longstraw, torch; print(torch.cuda.device_count())' 2>&1) ||
        fail "--python $python: can't import megatron_longstraw and torch (${found##*$'\n'}); run make setup"
    found=${found##*$'\n'}
    if [ "$gpus" -gt 0 ] && [ "$found" != "$gpus" ]; then
        fail "this node ($HOSTNAME) shows $found GPUs: needs $gpus ($layout, $ranks ranks a node)"
    fi
}

# The command of this node; a path is quoted as YAML, which --set reads.
make_command() {
    command=()
    if [ "$gpus" -eq 0 ]; then command+=(env OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=); fi
    command+=("$python" -m torch.distributed.run --nnodes "$nnodes" --node-rank "$node_rank")
    command+=(--master-addr "$master_addr" --master-port "$master_port" --nproc-per-node "$ranks")
    command+=(-m megatron_longstraw train --config "$checkout/$config" --rollouts "$rollouts" --output "$output")
    command+=(--set "data.tokenizer='${tokenizer//\'/\'\'}'")
    if [ -n "$weights" ]; then command+=(--set "model.weights='${weights//\'/\'\'}'"); fi
    if [ ${#extra[@]} -gt 0 ]; then command+=("${extra[@]}"); fi
}

# torchrun kills its ranks 30 s after a signal. So it gets none: the ranks do, and take the time that a step needs.
run_command() {
    setsid "${command[@]}" &
    torchrun=$!
    local status=0 ended=0
    trap 'ended=130; pkill -INT -P "$torchrun" || true' INT
    trap 'ended=143; pkill -TERM -P "$torchrun" || true' TERM
    while kill -0 "$torchrun" 2>/dev/null; do
        status=0
        wait "$torchrun" || status=$? # a trap ends it early
    done
    if [ "$status" -ne 0 ] && [ "$ended" -ne 0 ]; then status=$ended; fi # torchrun has 1 for all
    exit "$status"
}

launch() {
    fallback_tokenizer=${fallback_tokenizer:-}
    default_tokenizer=${fallback_tokenizer:-the folder of --weights}
    parse "$@"
    check_options
    find_python
    make_command
    if [ -n "$print_only" ]; then
        printf '%q ' "${command[@]}"
        printf '\n'
        exit 0
    fi
    check_machine
    run_command
}
