#!/bin/sh
# Makes .venv (the service), .sandbox-packages (what programs may import) and the web page's editor (see deploy/editor.sh), once;
# a second run takes no time. .sandbox-packages is a link to .sandbox-packages-VERSION, for the Python that runs programs.
#   sh deploy/setup.sh [EXTRAS]      EXTRAS of pyproject.toml, `server` if not given
# PYTHON names the service's interpreter, `python3` if not given. PROGRAM_PYTHON names another one to run programs, or is `fastest`
# (deploy/fastest-python.sh); if it is not given, programs run on the service's.
# Installs the versions that the pin files name (sh deploy/pin.sh writes these), or the newest with PINS=newest.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-server}
python=${PYTHON:-python3}
program_python=${PROGRAM_PYTHON:-}
pins=${PINS:-pinned}

say() { printf '%s\n' "$*" >&2; }
fail() { say "exec-service: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

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

# Installs what programs may import for the Python $1 of version $2, and makes this folder the one in use.
install_packages() {
    folder=.sandbox-packages-$2
    wanted="with font cache $(cat worker/sandbox/packages.txt deploy/packages-constraints.txt | cksum) $pins $("$1" -V)"
    if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
        say "installing what programs may import into $folder (numpy, scipy, sympy, … about a minute)"
        rm -rf "$folder.new"
        # shellcheck disable=SC2086
        .venv/bin/pip --python "$1" install --quiet --disable-pip-version-check --no-warn-conflicts --target "$folder.new" \
            -r worker/sandbox/packages.txt $programs || return
        # matplotlib's cache of the system's fonts, so that no interpreter has to make its own
        MPLCONFIGDIR=$folder.new/.matplotlib PYTHONPATH=$folder.new MPLBACKEND=Agg "$1" -c 'import matplotlib.pyplot' 2>/dev/null || true
        printf '%s\n' "$wanted" > "$folder.new/installed"
        rm -rf "$folder"
        mv "$folder.new" "$folder" || return
    fi
    [ -L .sandbox-packages ] || rm -rf .sandbox-packages
    rm -f "$folder/.python"
    ln -sfn "$folder" .sandbox-packages
}

# Builds the sandbox's C part for the Python $1 of version $2, beside the one of .venv.
build_for() {
    wanted=$(stamp setup.py worker/sandbox/inside/native/*)
    [ "$(cat "build/python-$2/built" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "build/python-$2"
    mkdir -p "build/python-$2"
    # shellcheck disable=SC2086
    .venv/bin/pip --python "$1" install --quiet --disable-pip-version-check --target "build/python-$2" $build || return
    PYTHONPATH=build/python-$2 "$1" setup.py --quiet build_ext --inplace --build-temp "build/python-$2/temp" >/dev/null || return
    printf '%s\n' "$wanted" > "build/python-$2/built"
}

version_of() { "$1" -c 'import sys; print("{}.{}".format(*sys.version_info))'; }

# A Python that the user named has to work. The fastest one may lack a wheel; then programs run on the service's.
install_program_python() {
    [ "$program_python" != fastest ] || program_python=$(sh deploy/fastest-python.sh)
    [ -n "$program_python" ] || return 1
    program_python=$(command -v "$program_python") || fail "there is no $PROGRAM_PYTHON on this machine."
    version=$(version_of "$program_python")
    [ "$version" != "$(version_of .venv/bin/python)" ] || return 1
    if build_for "$program_python" "$version" && PIP_ONLY_BINARY=:all: install_packages "$program_python" "$version"; then
        ln -sfn "$program_python" .sandbox-packages/.python # worker/sandbox/interpreter.py
    elif [ "$PROGRAM_PYTHON" = fastest ]; then
        say "exec-service: $program_python cannot run programs here (see above); they run on the service's Python."
        return 1
    else
        fail "programs cannot run on $PROGRAM_PYTHON (see above)." "Leave out PROGRAM_PYTHON to run them on the service's Python."
    fi
}

install_program_python || install_packages .venv/bin/python "$(version_of .venv/bin/python)"

wait $editor || say "exec-service: the web page's editor was not built; the page has a plain one."
