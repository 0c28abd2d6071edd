#!/bin/sh
# Fetches what the tests of the web page and of the metrics look with, once: Chromium (Debian and Ubuntu, as root, into the
# system) and Prometheus with promtool (Debian's, unpacked into .tools; nothing is started). Where that cannot be done it says so
# and ends well: those tests are skipped then, or fail in CI. Also Debian's Redis (as root), so that the cluster is tested on it
# beside the server that pip brings, and perf (as root).
set -eu
cd "$(dirname "$0")/.."

say() { printf 'exec-service: %s\n' "$*" >&2; }

# Not named like the programs: `command -v` would find the functions.
get_chromium() {
    for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v "$name" >/dev/null && return; done
    if [ "$(id -u)" != 0 ]; then say "no Chromium: the tests of the web page need it (apt-get install chromium)"; return; fi
    say "installing Chromium for the tests of the web page"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null || say "that failed"
}

get_prometheus() {
    { command -v prometheus && command -v promtool; } >/dev/null && return
    [ ! -x .tools/debian/usr/bin/promtool ] || return 0
    say "fetching Prometheus for the tests of metrics and alerts"
    mkdir -p .tools/download
    if (cd .tools/download && apt-get download -qq prometheus 2>/dev/null); then
        dpkg-deb -x .tools/download/prometheus_*.deb .tools/debian
    else
        say "that failed; the tests need prometheus and promtool on PATH"
    fi
    rm -rf .tools/download
}

get_redis() {
    command -v redis-server >/dev/null && return
    server=.tools/debian/usr/bin/redis-server
    [ ! -x "$server" ] || return 0
    if [ "$(id -u)" != 0 ]; then say "no redis-server: the cluster is tested with another server only (apt-get install redis-server)"; return; fi
    say "installing Redis for the tests of a cluster"
    # The package redis-server would start a service. The program itself is in redis-tools, by another name: it is a server if
    # it is called one.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-tools >/dev/null || { say "that failed"; return; }
    mkdir -p .tools/debian/usr/bin
    ln -sf "$(command -v redis-check-rdb)" "$server"
    "$server" --version >/dev/null || { say "that failed"; rm "$server"; }
}

get_perf() {
    command -v perf >/dev/null && return
    if [ "$(id -u)" != 0 ]; then say "no perf: the test of the profile needs it (apt-get install linux-perf)"; return; fi
    say "installing perf for the test of the profile"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends linux-perf >/dev/null || say "that failed"
}

if ! command -v apt-get >/dev/null; then
    say "Chromium, Prometheus and Redis are not fetched here (no apt-get); put chromium, prometheus, promtool and redis-server on PATH to have their tests run"
    exit 0
fi
# A fresh container has no lists of packages.
if [ "$(id -u)" = 0 ] && [ -z "$(apt-cache policy prometheus 2>/dev/null)" ]; then apt-get update -qq; fi
get_chromium
get_prometheus
get_redis
get_perf
