# Shared by the launch scripts, which source it: options, checks of this machine, and the start of torchrun.
# A script sets config (relative to the checkout), layout (in words), gpus (of a node; 0 for CPU ranks), ranks (of a
# node) and base_nodes (what the layout needs; a multiple of it is data parallel), then calls: launch "$@"
# It may set fallback_rollouts, fallback_tokenizer and fallback_output (1: a temporary folder), for options not given.
# shellcheck shell=bash disable=SC2154

unset CDPATH # with it, cd prints the folder
checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
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

  --rollouts FILE     rollout groups (JSONL); every node reads it${fallback_rollouts:+ (default: $fallback_rollouts)}
  --output DIR        folder for metrics.jsonl and weights/, shared by all nodes${fallback_output:+ (default: a temporary one)}
  --weights DIR       HuggingFace folder (safetensors) to start from; by default weights are drawn from the seed
  --tokenizer PATH    tokenizer.json or its folder, or "bytes" (default: ${fallback_tokenizer:-the folder of --weights})
  --nnodes N          nodes of the run (default $base_nodes)
  --node-rank R       which of them this is, from 0 (needed where there are several)
  --master-addr HOST  where node 0 listens (needed where there are several)
  --master-port PORT  its port (default 29500)
  --python PATH       Python with this project in it (default: .venv of the checkout, else python3)
  --print             show the command of this node, start nothing, and check no files or GPUs
  --help              this text

Ctrl-C, or SIGTERM or SIGHUP to this script, ends the run after its current step, with the weights saved, or
at once where no rank has started yet; a second one kills this node's ranks at once.
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
    rollouts=${rollouts:-$fallback_rollouts}
    if [ -z "$rollouts" ]; then fail "--rollouts FILE is missing"; fi
    if [ -z "$output$fallback_output" ]; then fail "--output DIR is missing"; fi
    if [ -z "$tokenizer" ]; then tokenizer=${weights:-$fallback_tokenizer}; fi
    if [ -z "$tokenizer" ]; then fail "--weights DIR or --tokenizer PATH is missing: the text of rollouts needs a tokenizer"; fi
    whole_number --nnodes "$nnodes" 1 99999
    if [ $((nnodes % base_nodes)) -ne 0 ]; then
        fail "--nnodes $nnodes: needs a multiple of $base_nodes nodes of $ranks ranks ($layout)"
    fi
    if [ "$nnodes" -gt 1 ]; then
        if [ -z "$node_rank" ]; then fail "--node-rank is missing: which of the $nnodes nodes this is, from 0"; fi
        if [ -z "$master_addr" ]; then fail "--master-addr is missing: the host of node 0"; fi
        if [ -z "$output" ]; then fail "--output DIR is missing: the $nnodes nodes share it"; fi
    fi
    node_rank=${node_rank:-0} master_addr=${master_addr:-127.0.0.1}
    whole_number --node-rank "$node_rank" 0 $((nnodes - 1))
    whole_number --master-port "$master_port" 1 65535
    temporary=''
    if [ -z "$output" ]; then
        temporary=$(mktemp -u -t longstraw.XXXXXXXXXX) # a name: the ranks make the folder
        output=$temporary
    fi
}

# Its option, the value, and the least and the largest, of at most five digits: bash counts to 2^63 only.
whole_number() {
    case $2 in
    '' | 0?* | *[!0-9]* | ??????*) ;;
    *) if [ "$2" -ge "$3" ] && [ "$2" -le "$4" ]; then return; fi ;;
    esac
    fail "$1 $2: needs a whole number from $3 to $4"
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
    [ -r "$rollouts" ] || fail "--rollouts $rollouts: can't be read on this node ($HOSTNAME)"
    if [ -n "$weights" ]; then
        [ -d "$weights" ] || fail "--weights $weights: no such folder on this node ($HOSTNAME)"
        compgen -G "$weights/*.safetensors" >/dev/null || fail "--weights $weights: has no .safetensors file"
    fi
    [ "$tokenizer" = bytes ] || [ -e "$tokenizer" ] ||
        fail "--tokenizer $tokenizer: no such file or folder on this node ($HOSTNAME)"
    if [ -e "$output/metrics.jsonl" ]; then
        fail "--output $output: a run's metrics.jsonl is there already; name another folder"
    fi
    check_writable "$output"
    check_writable "$output/weights"
    check_run
}

# That files can go into a folder which is there, or can be made.
check_writable() {
    local folder=$1
    while [ ! -e "$folder" ] && [ "${folder%/*}" != "$folder" ]; do folder=${folder%/*}; done
    if [ -z "$folder" ]; then folder=/; fi
    if [ ! -e "$folder" ]; then folder=.; fi
    if [ ! -d "$folder" ]; then fail "--output $output: can't be written: $folder is no folder"; fi
    if [ ! -w "$folder" ] || [ ! -x "$folder" ]; then
        fail "--output $output: can't be written on this node ($HOSTNAME): $folder allows no new files"
    fi
}

# The options of train by its own parser, what each rank checks, the port of node 0, and the number of GPUs.
check_run() {
    local found status=0
    found=$("${run_python[@]}" -m megatron_longstraw.launch_check --world-size $((nnodes * ranks)) \
        --node-rank "$node_rank" --master-port "$master_port" --rollouts "$rollouts" --output "$output" \
        "${arguments[@]}" 2>&1) || status=$?
    found=${found##*$'\n'}
    case $status in
    0) ;;
    2) fail "${found#*error: } (told by $python on this node, $HOSTNAME)" ;;
    *) fail "--python $python: can't import megatron_longstraw and torch, or they failed ($found); run make setup" ;;
    esac
    if [ "$gpus" -gt 0 ] && [ "$found" != "$gpus" ]; then
        fail "this node ($HOSTNAME) shows $found GPUs: needs $gpus ($layout, $ranks ranks a node)"
    fi
}

# The command of this node; a path is quoted as YAML, which --set reads.
make_command() {
    arguments=(train --config "$checkout/$config" --rollouts "$rollouts" --output "$output")
    arguments+=(--set "data.tokenizer='${tokenizer//\'/\'\'}'")
    if [ -n "$weights" ]; then arguments+=(--set "model.weights='${weights//\'/\'\'}'"); fi
    if [ ${#extra[@]} -gt 0 ]; then arguments+=("${extra[@]}"); fi
    run_python=("$python")
    if [ "$gpus" -eq 0 ]; then run_python=(env OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= "$python"); fi
    command=("${run_python[@]}" -m torch.distributed.run --nnodes "$nnodes" --node-rank "$node_rank")
    command+=(--master-addr "$master_addr" --master-port "$master_port" --nproc-per-node "$ranks")
    command+=(-m megatron_longstraw "${arguments[@]}")
}

# Processes that torchrun started, by the fourth field of /proc/*/stat, behind a name that may hold anything.
list_ranks() {
    local stat line
    local -a fields
    for stat in /proc/[0-9]*/stat; do
        { read -r line <"$stat"; } 2>/dev/null || continue # it has ended
        read -r -a fields <<<"${line##*) }"
        if [ "${fields[1]:-}" = "$torchrun" ]; then
            stat=${stat#/proc/}
            printf '%s\n' "${stat%/stat}"
        fi
    done
}

# torchrun kills its ranks 30 s after a signal. So it gets none: the ranks do, and take the time that a step needs.
# Before it has any, it waits for other nodes and gets SIGTERM, which ends it; SIGINT would wait with it.
pass_on() {
    local started rank
    started=$(list_ranks)
    if [ "$signals" -gt 1 ]; then
        for rank in $torchrun $started; do # each leads a group of its own
            kill -KILL -- "-$rank" 2>/dev/null || kill -KILL "$rank" 2>/dev/null || true
        done
    elif [ -n "$started" ]; then
        # shellcheck disable=SC2086 # one argument a rank
        kill "-$1" $started 2>/dev/null || true
    else
        kill -TERM "$torchrun" 2>/dev/null || true
    fi
}

# A status and the signal for the ranks, which know INT and TERM. A signal may come before torchrun has an id.
on_signal() {
    ended=$1
    signals=$((signals + 1))
    if [ -n "$torchrun" ]; then pass_on "$2"; fi
}

run_command() {
    local status seen
    torchrun='' ended=0 signals=0
    trap 'on_signal 129 TERM' HUP
    trap 'on_signal 130 INT' INT
    trap 'on_signal 143 TERM' TERM
    (trap - INT && exec setsid "${command[@]}") & # bash has it ignore SIGINT, and its ranks would while they start
    torchrun=$!
    if [ "$signals" -gt 0 ]; then pass_on TERM; fi
    while :; do
        seen=$signals status=0
        wait "$torchrun" || status=$?
        if [ "$signals" -eq "$seen" ]; then break; fi # else a trap ended it
    done
    if [ "$status" -ne 0 ] && [ "$ended" -ne 0 ]; then status=$ended; fi # torchrun has 1 for all
    exit "$status"
}

launch() {
    fallback_rollouts=${fallback_rollouts:-} fallback_tokenizer=${fallback_tokenizer:-} fallback_output=${fallback_output:-}
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
    if [ -n "$temporary" ]; then printf '%s: output goes to %s\n' "$script" "$temporary" >&2; fi
    run_command
}
