#!/bin/sh
# Makes .venv with the package (editable) and its "test" extra; returns at once where that is done.
# usage: setup.sh [--show]      from the top of the checkout; --show: say so where nothing is to do
#
# .venv/setup.done        says for which checkout and which requirements the set-up was completed.
# .venv/setup.unfinished  is there while one runs. pip leaves half-written packages that it later believes in, so
#                         an interrupted set-up starts over from an empty .venv.
# .venv/setup.log         is pip's output.
# A .venv with neither mark was made by hand: it is added to, and not marked or replaced before that is done.
set -u

say() { printf 'setup: %s\n' "$1"; }

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

# What an installed checkout depends on: its path, which the editable install and the scripts of .venv hold, and the
# requirements. The settings of the checkers do not ask for a new set-up.
checkout=$(pwd -P)
requirements=$(awk '/^\[/ { keep = !/^\[+tool\.(ruff|mypy|pytest)/ } keep' pyproject.toml | cksum)
wanted="$checkout
$requirements"

is_done() {
    [ ! -e .venv/setup.unfinished ] && [ "$(cat .venv/setup.done 2>/dev/null)" = "$wanted" ] &&
        .venv/bin/python -I -c '' 2>/dev/null
}

describe() {
    .venv/bin/python -I -c '
import sys
from importlib.metadata import version
names = ("torch", "megatron-core")
print("Python %d.%d.%d" % sys.version_info[:3], *(f"{name} {version(name)}" for name in names), sep=", ")'
}

# Leaves a .venv that pip can install into, as its marks say.
prepare_venv() {
    redo=
    if [ -e .venv/setup.unfinished ]; then
        redo="the last set-up did not finish"
    elif [ -e .venv/setup.done ]; then
        if [ "$(head -n 1 .venv/setup.done)" != "$checkout" ]; then
            redo="the checkout has moved from $(head -n 1 .venv/setup.done)"
        elif ! .venv/bin/python -I -c '' 2>/dev/null; then
            redo="the Python of .venv is gone"
        else
            say "pyproject.toml has changed: bringing .venv up to date"
            : >.venv/setup.unfinished
        fi
    elif [ -e .venv/pyvenv.cfg ]; then
        .venv/bin/python -I -c 'import sys, pip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null ||
            fail ".venv was not made by make setup, and is no Python 3.12 with pip: remove it, then run make setup again"
        say "using the .venv that is here"
    fi
    if [ -n "$redo" ]; then say "$redo: starting over"; fi
    if [ -n "$redo" ] || [ ! -e .venv/pyvenv.cfg ]; then
        python=$(sh .ci/find_python.sh "${PYTHON:-}") || exit 1
        discard_venv
        say "making .venv from $python"
        mkdir .venv && : >.venv/setup.unfinished || exit 1
        "$python" -I -m venv .venv || fail "$python could not make .venv"
    fi
}

# Renamed first: an interrupted removal must not leave a .venv without its mark.
discard_venv() {
    rm -rf .venv.old || exit 1
    if [ -e .venv ] || [ -h .venv ]; then mv .venv .venv.old || exit 1; fi
    rm -rf .venv.old || exit 1
}

# pip, with the downloads of 100 MB and more for a sign of life; all of it goes to the log.
install() {
    {
        PIP_USER=0 .venv/bin/python -I -m pip install --disable-pip-version-check --no-input --progress-bar off \
            -e '.[test]' 2>&1 </dev/null
        echo "pip exit $?"
    } | while IFS= read -r line; do
        printf '%s\n' "$line" >&3
        case $line in
        *Downloading*[0-9][0-9][0-9].[0-9]" MB)" | *cached*[0-9][0-9][0-9].[0-9]" MB)" | *" GB)") echo " $line" ;;
        "Installing collected packages"*) say "unpacking" ;;
        esac
    done 3>.venv/setup.log
    [ "$(tail -n 1 .venv/setup.log)" = "pip exit 0" ]
}

set_up() {
    start=$(date +%s)
    prepare_venv
    say "installing torch, Megatron-Core and what the tests need: GBs to download the first time, a few minutes"
    if ! install; then
        grep -vE 'is ignored: it is neither a file|^Requirement already' .venv/setup.log | tail -n 15 >&2
        # pip fails for want of a network before it touches anything: a .venv that was complete stays so.
        if [ -e .venv/setup.done ] && ! grep -q '^Installing collected' .venv/setup.log; then
            rm -f .venv/setup.unfinished
        fi
        fail "pip failed (above; all of it in .venv/setup.log): make setup tries again"
    fi
    printf '%s\n' "$wanted" >.venv/setup.done
    rm -f .venv/setup.unfinished
    say "done in $(($(date +%s) - start)) s: $(describe)"
}

# Ends the script where nothing is to do.
stop_if_done() {
    if is_done; then
        if [ "$show" = --show ]; then say ".venv is ready: $(describe)"; fi
        exit
    fi
}

show=${1:-}
stop_if_done
# One set-up at a time in a checkout; the lock goes with this process.
exec 9<pyproject.toml
if command -v flock >/dev/null && ! flock -n 9; then
    say "another set-up is running in this checkout: waiting for it"
    flock 9
    stop_if_done
fi
set_up
