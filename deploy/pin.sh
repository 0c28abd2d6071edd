#!/bin/sh
# Writes the exact versions that `make` and the images install, for every Python from 3.11 on: the newest that fit pyproject.toml and
# worker/sandbox/packages.txt. `sh deploy/pin.sh keep` changes no version that still fits; run it after adding a requirement.
set -eu
cd "$(dirname "$0")/.."
upgrade=--upgrade
[ "${1:-}" != keep ] || upgrade=
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uv
uv() { "$folder/venv/bin/uv" pip compile --quiet --no-header --no-annotate "$@" >/dev/null; }

pin() {  # pin FILE WORDS WHAT…
    file=deploy/$1 words=$2; shift 2
    cp "$file" "$folder/pins" 2>/dev/null || : > "$folder/pins"
    uv --universal --python-version 3.11 $upgrade --output-file "$folder/pins" "$@"
    # A version without a wheel for one of the Pythons would have to be built there.
    for version in 3.11 3.12 3.13 3.14; do
        uv --python-version $version --python-platform x86_64-manylinux_2_36 --only-binary :all: --constraints "$folder/pins" \
            --output-file "$folder/checked-$version" "$@"
    done
    { printf '# %s New versions: sh deploy/pin.sh\n' "$words"; grep -vE "sys_platform == '(win32|emscripten)'" "$folder/pins"; } > "$file"
}
printf 'setuptools>=77\nwheel\n' > "$folder/build.txt"
pin build-constraints.txt "Build tools." "$folder/build.txt"
pin constraints.txt "The service: what the images and \`make run\` install." --extra server pyproject.toml
pin dev-constraints.txt "The service, its tests and linters, and the trainer: what \`make test\` installs." \
    --extra dev --extra trainer --constraints deploy/constraints.txt --constraints deploy/build-constraints.txt pyproject.toml
pin ray-constraints.txt "The service with Ray: what \`make test-cluster-managers\` installs." \
    --extra ray --constraints deploy/dev-constraints.txt pyproject.toml
pin packages-constraints.txt "What programs may import (worker/sandbox/packages.txt)." worker/sandbox/packages.txt
