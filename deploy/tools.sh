#!/bin/sh
# Fetches what checks the deployment, once; a second run takes no time.
#   sh deploy/tools.sh               helm, hadolint and the schemas, into .tools
#   sh deploy/tools.sh containers    also Debian's podman, buildah, runc, debootstrap and what they need, into the system (root)
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
for tool in podman buildah runc debootstrap catatonit iptables; do
    command -v $tool >/dev/null || missing="$missing $tool"
done
[ -x /usr/lib/cni/bridge ] || missing="$missing containernetworking-plugins"
# Where podman takes user namespaces for pods from (hostUsers: false), as its manual proposes.
if [ "$(id -u)" = 0 ]; then
    for file in /etc/subuid /etc/subgid; do
        grep -qs '^containers:' $file || echo containers:2147483647:2147483648 >> $file
    done
fi
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "exec-service: to build and start the images, install$missing (Debian and Ubuntu, as root: apt-get install$missing)" >&2
    exit 1
fi
apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
