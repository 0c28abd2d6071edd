#!/bin/sh
# Fetches what checks the deployment, once; a second run takes no time.
#   sh deploy/tools.sh               helm, hadolint and the schemas, into .tools
#   sh deploy/tools.sh containers    also Debian's podman, buildah, runc and debootstrap, into the system (root)
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

if [ "$(cat .tools/installed 2>/dev/null)" != "$(cksum < deploy/tools.txt)" ]; then
    [ -x .tools/bin/python ] || "$python" -m venv .tools
    .tools/bin/pip install --quiet --disable-pip-version-check -r deploy/tools.txt
    cksum < deploy/tools.txt > .tools/installed
fi

[ "${1:-}" = containers ] || exit 0
missing=
for tool in podman buildah runc debootstrap; do command -v $tool >/dev/null || missing="$missing $tool"; done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "exec-service: to build and start the images, install$missing (Debian and Ubuntu, as root: apt-get install$missing)" >&2
    exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
