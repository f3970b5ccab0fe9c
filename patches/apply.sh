#!/bin/sh
# Patches a Megatron-LM checkout of tag core_v0.19.0, or a folder that holds a copy of the wheel's megatron/, so that
# Megatron's own training loop takes --longstraw (see README.md, "Patches").
#
#   patches/apply.sh [--check | --reverse] CHECKOUT
#
# All patches or none; a tree that has them already is left as it is. Exit status: 0 the tree is as asked for (with
# --check: could be patched, or is), 1 the tree differs from core_v0.19.0 where it would be patched, 2 wrong usage.
set -u

usage() {
    echo "usage: $0 [--check | --reverse] CHECKOUT" >&2
    exit 2
}

action=apply
case "${1-}" in
    --check) action=check; shift ;;
    --reverse) action=reverse; shift ;;
esac
[ $# -eq 1 ] || usage
command -v git >/dev/null || { echo "$0: git is not here: needs it for git apply" >&2; exit 2; }
patches=$(cd "$(dirname "$0")/core_v0.19.0" && pwd) || exit 2
tree=$(cd "$1" 2>/dev/null && pwd -P) || { echo "$0: $1 is not a folder" >&2; exit 2; }
if [ ! -f "$tree/megatron/training/training.py" ]; then
    echo "$0: $tree has no megatron/training/training.py: needs a Megatron-LM checkout, or the folder over a copy of the wheel's megatron/" >&2
    exit 2
fi

# Where the tree lies within another repository, git must not take that one's root for the tree's.
in_tree() {
    (cd "$tree" && GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply "$@")
}

selected=training.patch
if [ -f "$tree/megatron/rl/rl_utils.py" ]; then
    selected="$selected checkout.patch"
else
    echo "checkout.patch is left out: it is for files that only a checkout has (train_rl.py, megatron/rl, pretrain_gpt.py)"
fi

todo=
for patch in $selected; do
    if in_tree --check --reverse "$patches/$patch" 2>/dev/null; then
        now=applied
    elif why=$(in_tree --check "$patches/$patch" 2>&1); then
        now=absent
    else
        echo "$why" >&2
        echo "$0: $tree differs from core_v0.19.0 where $patch would change it; nothing was changed" >&2
        exit 1
    fi
    echo "$patch: $now"
    case "$action-$now" in
        apply-absent | reverse-applied) todo="$todo $patch" ;;
    esac
done

[ "$action" != check ] && [ -n "$todo" ] || exit 0
flag=
[ "$action" = apply ] || flag=--reverse
# in one stream, which git applies whole or not at all
for patch in $todo; do
    cat "$patches/$patch"
done | in_tree $flag - || exit 1
echo "$action: done"
