#!/bin/sh
# Writes the exact versions that the images install: the newest that fit pyproject.toml and worker/sandbox/packages.txt.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pin() {  # pin FILE WORDS REQUIREMENT…
    file=$1 words=$2; shift 2
    "${PYTHON:-python3}" -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$@"
    { printf '# %s New versions: sh deploy/pin.sh\n' "$words"; "$folder/venv/bin/pip" freeze --exclude exec-service; } > "$file"
}
pin deploy/constraints.txt "What the images install for the service, exactly." ".[server]"
pin deploy/packages-constraints.txt "Versions of what programs may import (worker/sandbox/packages.txt) in the runner's image." \
    -r worker/sandbox/packages.txt
