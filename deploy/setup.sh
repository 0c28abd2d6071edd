#!/bin/sh
# Makes .venv (the service), .sandbox-packages (what programs may import) and the web page's editor (see deploy/editor.sh), once;
# a second run takes no time.
#   sh deploy/setup.sh [EXTRAS]      EXTRAS of pyproject.toml, `server` if not given
# PYTHON names the interpreter, `python3` if not given. PYTHON=fastest: see deploy/fastest-python.sh.
# Installs the versions that the pin files name (sh deploy/pin.sh writes these), or the newest with PINS=newest.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-server}
python=${PYTHON:-python3}
pins=${PINS:-pinned}

say() { printf '%s\n' "$*" >&2; }
fail() { say "exec-service: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

if [ "$python" = fastest ]; then
    faster=$(sh deploy/fastest-python.sh) python=python3
    if [ ! -e .venv ] && [ "$faster" != python3 ]; then
        say "using $faster"
        PYTHON=$faster PIP_ONLY_BINARY=:all: sh deploy/setup.sh "$extras" && exit
        say "exec-service: installing with $faster failed; using python3."
        rm -rf .venv
    fi
fi

[ "$(uname -s)" = Linux ] || fail "the sandbox needs Linux, this is $(uname -s)." \
    "The client works everywhere: make wheels on Linux, then pip install dist/exec_client-*.whl"
command -v "$python" >/dev/null || fail "there is no $python on this machine." "Install Python 3.11 or newer, or say PYTHON=/path/to/python make …"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    fail "Python 3.11 or newer is needed; $python is $("$python" -V)." "Say PYTHON=/path/to/python3.11 make …"
"$python" -c 'import venv, ensurepip' 2>/dev/null || \
    fail "Python's venv module is missing." "On Debian and Ubuntu: apt-get install python3-venv"
if ! command -v "${CC:-gcc}" >/dev/null && ! command -v cc >/dev/null; then
    fail "a C compiler is missing; a small part of the sandbox is built here." "On Debian and Ubuntu: apt-get install gcc"
fi
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
[ -f "$header" ] || fail "Python's headers are missing ($header)." "On Debian and Ubuntu: apt-get install python3-dev"

stamp() { { cat "$@"; echo "$pins"; .venv/bin/python -V; } | cksum; }
install() { .venv/bin/pip install --quiet --disable-pip-version-check "$@"; }
case $pins in
    pinned)
        build="-r deploy/build-constraints.txt"
        service="-c deploy/constraints.txt -c deploy/dev-constraints.txt"
        programs="-c deploy/packages-constraints.txt" ;;
    newest) build="--upgrade setuptools wheel" service=--upgrade programs=--upgrade ;;
    *) fail "PINS=$pins is unknown." "Say PINS=pinned, which is the default, or PINS=newest." ;;
esac

for folder in . .venv .sandbox-packages; do
    [ ! -d "$folder" ] || [ -w "$folder" ] || fail "$folder belongs to another user." "Make a clone of your own: git clone . ~/exec-service"
done

PINS=$pins sh deploy/editor.sh &
editor=$!

[ -x .venv/bin/python ] || { say "making .venv"; "$python" -m venv .venv; }

# What `dev` installs contains what `server` needs, and `dev,trainer` what both do.
wanted=$(stamp pyproject.toml setup.py worker/sandbox/inside/native/* deploy/constraints.txt deploy/dev-constraints.txt deploy/build-constraints.txt)
if [ "$(cat ".venv/installed-$extras" 2>/dev/null)" != "$wanted" ]; then
    say "installing the service into .venv"
    # shellcheck disable=SC2086
    install $build
    # What is imported is compiled then; all of torch and transformers would take a minute.
    # shellcheck disable=SC2086
    install --no-compile --no-build-isolation $service -e ".[$extras]"
    .venv/bin/python -c 'import worker.sandbox.inside._zygote' || fail "the sandbox's C part was not built." \
        "See what the compiler says: .venv/bin/python setup.py build_ext --inplace"
    case $extras in dev*) printf '%s\n' "$wanted" > .venv/installed-server ;; esac
    case $extras in dev,*) printf '%s\n' "$wanted" > .venv/installed-dev ;; esac
    printf '%s\n' "$wanted" > ".venv/installed-$extras"
fi

packages=worker/sandbox/packages.txt
wanted="with font cache $(stamp "$packages" deploy/packages-constraints.txt)"
if [ "$(cat .sandbox-packages/installed 2>/dev/null)" != "$wanted" ]; then
    say "installing what programs may import into .sandbox-packages (numpy, scipy, sympy, … about a minute)"
    rm -rf .sandbox-packages.new
    # shellcheck disable=SC2086
    install --no-warn-conflicts --target .sandbox-packages.new -r "$packages" $programs
    # matplotlib's cache of the system's fonts, so that no interpreter has to make its own
    MPLCONFIGDIR=.sandbox-packages.new/.matplotlib PYTHONPATH=.sandbox-packages.new MPLBACKEND=Agg \
        .venv/bin/python -c 'import matplotlib.pyplot' 2>/dev/null || true
    printf '%s\n' "$wanted" > .sandbox-packages.new/installed
    rm -rf .sandbox-packages
    mv .sandbox-packages.new .sandbox-packages
fi

wait $editor || say "exec-service: the web page's editor was not built; the page has a plain one."
