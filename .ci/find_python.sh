#!/bin/sh
# Prints the path of the Python to make .venv from; or one sentence on stderr, and exits 1.
# usage: find_python.sh [PYTHON]      with PYTHON: that one or none
#
# Python 3.12 is what is tested, so every 3.12 is tried before a 3.13; Megatron-Core 0.19.2 has no wheel for 3.14.
# Candidates are run, not trusted by their name: pyenv's shim python3.12 may have no 3.12 behind it.
set -u

pyenv_versions=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
uv_pythons=${UV_PYTHON_INSTALL_DIR:-${HOME:-}/.local/share/uv/python}

# Prints "VERDICT VERSION PATH" with the verdict ok, bare (no venv) or version (the wrong one); nothing where it
# does not run. In a virtual environment, PATH is the Python below it: the environment may be the .venv to replace.
probe() {
    "$1" -I -c '
import sys
path = sys.executable if sys.prefix == sys.base_prefix else sys._base_executable
verdict = "ok"
if not (3, 12) <= sys.version_info[:2] < (3, 14):
    verdict = "version"
else:
    try:
        import ensurepip, ssl, venv
    except ImportError:
        verdict = "bare"
print(verdict, "%d.%d.%d" % sys.version_info[:3], path)
' 2>/dev/null </dev/null
}

# All that PATH has of that name, not the first alone: a shim may hide a real one.
on_path() (
    set -f
    IFS=:
    for dir in ${PATH:-}; do
        if [ -f "$dir/$1" ] && [ -x "$dir/$1" ]; then printf '%s\n' "$dir/$1"; fi
    done
)

# The newest patch release first.
in_pyenv() {
    (cd "$pyenv_versions" 2>/dev/null && ls -d "$1".*) 2>/dev/null | sort -t . -k 3,3nr |
        while IFS= read -r version; do printf '%s\n' "$pyenv_versions/$version/bin/python"; done
}

in_uv() {
    for python in "$uv_pythons/cpython-$1".*/bin/"python$1"; do printf '%s\n' "$python"; done
}

candidates() {
    for minor in 3.12 3.13; do
        on_path "python$minor"
        in_pyenv "$minor"
        in_uv "$minor"
    done
    on_path python3
}

# Every verdict up to the first good one.
search() {
    candidates | while IFS= read -r python; do
        verdict=$(probe "$python") || continue
        printf '%s\n' "$verdict"
        case $verdict in "ok "*) break ;; esac
    done
}

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

fail_bare() { # "bare VERSION PATH"
    rest=${1#bare }
    version=${rest%% *}
    fail "${rest#* } is Python $version without venv, ensurepip or ssl, which .venv needs: install them\
 (Debian, Ubuntu: apt-get install python${version%.*}-venv) or name another: make setup PYTHON=/path/to/python3.12"
}

if [ -n "${1:-}" ]; then
    verdict=$(probe "$1") || fail "PYTHON=$1 is no Python 3 that runs: name a Python 3.12, or leave PYTHON out to have one searched for"
    case $verdict in
    "ok "*) printf '%s\n' "${verdict#ok * }" ;;
    "bare "*) fail_bare "$verdict" ;;
    *) fail "PYTHON=$1 is Python $(echo "$verdict" | cut -d ' ' -f 2): 3.12 is needed (3.13 is let through, untested)" ;;
    esac
    exit
fi

seen=$(search)
case $(printf '%s\n' "$seen" | tail -n 1) in
"ok "*)
    last=$(printf '%s\n' "$seen" | tail -n 1)
    printf '%s\n' "${last#ok * }"
    exit
    ;;
esac
bare=$(printf '%s\n' "$seen" | grep '^bare ' | head -n 1)
if [ -n "$bare" ]; then fail_bare "$bare"; fi
others=$(printf '%s\n' "$seen" | sed -n 's/^version \([^ ]*\) .*/\1/p' | sort -u | paste -s -d , -)
fail "no Python 3.12 found${others:+ (only $others)}: looked for python3.12, python3.13 and python3 on PATH, and for\
 3.12 and 3.13 in $pyenv_versions and $uv_pythons; install one (apt-get install python3.12 python3.12-venv, or pyenv\
 install 3.12) or name one: make setup PYTHON=/path/to/python3.12"
