#!/bin/sh
# Patches a Megatron-LM checkout of tag core_v0.19.0, or a folder that holds a copy of the wheel's megatron/, so that
# Megatron's own training loop takes --longstraw (see README.md, "Patches").
#
#   patches/apply.sh [--check | --reverse] CHECKOUT
#   patches/apply.sh --help
#
# All patches or none; a tree that has them already is left as it is. Exit status: 0 the tree is as asked for (with
# --check: could be patched, or is), 1 the tree differs from core_v0.19.0 where it would be patched, 2 wrong usage,
# 3 its files can't be written (or are behind a symbolic link). With 1, 2 and 3 the tree is as it was; 4:
# writing failed, and so did putting the files back; it says where their copies are.
set -u
unset CDPATH GIT_DIR GIT_WORK_TREE # with the first, cd prints the folder; the others are of another repository

fail() {
    status=$1
    shift
    printf '%s\n' "$0: $*" >&2
    exit "$status"
}

usage() {
    echo "usage: $0 [--check | --reverse] CHECKOUT" >&2
    exit 2
}

action=apply
case "${1-}" in
    --help | -h) sed -n '2,/^set /{s/^# \{0,1\}//p;}' "$0"; exit 0 ;;
    --check) action=check; shift ;;
    --reverse) action=reverse; shift ;;
esac
[ $# -eq 1 ] || usage
case $1 in
    --*) usage ;;
    /*) tree=$1 ;;
    *) tree=./$1 ;; # cd takes - for another folder
esac
command -v git >/dev/null || fail 2 "git is not here: needs it for git apply"
patches=$(cd -- "$(dirname -- "$0")/core_v0.19.0" && pwd) || exit 2
tree=$(cd "$tree" 2>/dev/null && pwd -P) || fail 2 "$1 is not a folder"
if [ ! -f "$tree/megatron/training/training.py" ]; then
    fail 2 "$tree has no megatron/training/training.py: needs a Megatron-LM checkout, or the folder over a copy of the wheel's megatron/"
fi

# Where the tree lies within another repository, git must not take that one's root for the tree's. Line ends stay as
# they are, whatever the user's git makes of them in a checkout.
in_tree() {
    (cd "$tree" && GIT_CEILING_DIRECTORIES=$(dirname "$tree") git -c core.autocrlf=false apply "$@")
}

# The files that patches change, without spaces in their names.
targets() {
    for patch; do
        in_tree --numstat "$patches/$patch" | cut -f 3
    done | sort -u
}

selected=training.patch
if [ -f "$tree/megatron/rl/rl_utils.py" ]; then
    selected="$selected checkout.patch"
else
    echo "checkout.patch is left out: it is for files that only a checkout has (train_rl.py, megatron/rl, pretrain_gpt.py)"
fi

for file in $(targets $selected); do
    path=$file
    while [ "$path" != . ]; do
        [ ! -L "$tree/$path" ] || fail 3 "$tree/$path is a symbolic link, which git apply does not follow; nothing was changed"
        path=$(dirname "$path")
    done
done

todo=
for patch in $selected; do
    if in_tree --check --reverse "$patches/$patch" 2>/dev/null; then
        now=applied
    elif why=$(in_tree --check "$patches/$patch" 2>&1); then
        now=absent
    else
        echo "$why" >&2
        for file in $(targets "$patch"); do
            ! grep -qs "$(printf '\r')\$" "$tree/$file" ||
                echo "$0: lines of $file end in CR LF: needs LF, as in the repository (git config core.autocrlf false)" >&2
        done
        fail 1 "$tree differs from core_v0.19.0 where $patch would change it; nothing was changed"
    fi
    echo "$patch: $now"
    case "$action-$now" in
        apply-absent | check-absent | reverse-applied) todo="$todo $patch" ;;
    esac
done
[ -n "$todo" ] || exit 0

changed=$(targets $todo)
for file in $changed; do
    for path in "$tree/$file" "$(dirname "$tree/$file")"; do
        [ -w "$path" ] || fail 3 "$path can't be written by $(id -un); nothing was changed"
    done
done
[ "$action" != check ] || exit 0

# git apply checks all before it writes one, but takes nothing back where writing fails (a full disk). It is done in
# less than a second: signals are ignored so long.
trap '' HUP INT TERM
copies=$(mktemp -d) || fail 3 "can't keep copies of the files; nothing was changed"
copy() { # from a folder to another
    for file in $changed; do
        mkdir -p "$(dirname "$2/$file")" && cp -p "$1/$file" "$2/$file" || return
    done
}
copy "$tree" "$copies" || { rm -r "$copies"; fail 3 "can't keep copies of the files; nothing was changed"; }
keep_modes() { # git apply makes files anew, of the modes that umask says
    for file in $changed; do
        new=$tree/$file.longstraw
        cp -p "$copies/$file" "$new" && cat "$tree/$file" >"$new" && mv -f "$new" "$tree/$file" || { rm -f "$new"; return 1; }
    done
}
flag=
[ "$action" = apply ] || flag=--reverse
if ! { for patch in $todo; do cat "$patches/$patch"; done | in_tree $flag - && keep_modes; }; then
    copy "$copies" "$tree" ||
        fail 4 "writing the files failed, and so did putting them back: $tree is patched in part, and its files are in $copies"
    rm -r "$copies"
    fail 3 "could not write the files; they are back as they were"
fi
rm -r "$copies"
echo "$action: done"
