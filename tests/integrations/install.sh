#!/bin/sh
# An environment for each published client: sh tests/integrations/install.sh FOLDER [NAME]. A second run takes no time.
# One that cannot be installed is left with pip's words in pip.log, and its tests are skipped with them.
set -u
folder=$1
only=${2:-}
python=${PYTHON:-python3}

install() {
    name=$1; shift
    [ -z "$only" ] || [ "$only" = "$name" ] || return 0
    [ "$(cat "$folder/$name/installed" 2>/dev/null)" != "$*" ] || return 0
    echo "installing $* into $folder/$name" >&2
    "$python" -m venv "$folder/$name" || return 0
    if "$folder/$name/bin/pip" install --quiet --disable-pip-version-check "$@" >"$folder/$name/pip.log" 2>&1; then
        printf '%s\n' "$*" >"$folder/$name/installed"
    fi
}

install sandbox-fusion sandbox-fusion==0.3.7
install mcp mcp==2.3.0
install mcp1 mcp==1.30.0
# Of verl only its reward by SandboxFusion is used, which needs requests; the rest would bring torch and ray.
install verl --no-deps verl==0.9.1 requests==2.34.2 urllib3 idna certifi charset-normalizer
# A published receiver of OTLP with a page that shows traces.
install phoenix arize-phoenix==20.26.1
