#!/bin/sh
# Builds a release: the wheels, their checksums, and the images of gateway, worker and runner by docker or podman.
#   sh deploy/release.sh [FOLDER]      FOLDER for the wheels, `dist` if not given; REGISTRY=registry.example/rl in front of the images' names
# Without an engine the wheels are made all the same. Publishing is left to you: the last lines say how.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-dist}
bin=${BIN:-.venv/bin}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
say() { printf '%s\n' "$*" >&2; }

grep -q "^## $version" CHANGELOG.md || { say "exec-service: CHANGELOG.md has no section \"## $version\"; write it first."; exit 1; }
grep -q "^appVersion: \"$version\"" helm/exec-service/Chart.yaml || { say "exec-service: the chart's appVersion is not $version."; exit 1; }

rm -rf "$folder"
"$bin/python" deploy/wheels.py "$folder"
(cd "$folder" && sha256sum ./*.whl > SHA256SUMS)
say "Wheels of $version and SHA256SUMS are in $folder."

engine=
for name in docker podman; do
    if command -v $name >/dev/null && $name info >/dev/null 2>&1; then engine=$name; break; fi
done
if [ -z "$engine" ]; then
    say "No images: neither docker nor podman answers on this machine. Start one of them and run this again;"
    say "make test-deploy installs podman on Debian and Ubuntu (root)."
    exit 0
fi
images=
for name in gateway worker runner; do
    image=${REGISTRY:+$REGISTRY/}exec-service-$name:$version
    say "building $image"
    $engine build --quiet -f "deploy/$name.Dockerfile" -t "$image" . >/dev/null
    images="$images $image"
done
say "Images:$images"
say "To publish: twine upload $folder/*.whl; for each image: $engine push IMAGE"
