#!/bin/sh
# Installs what tests/managers runs on, once: Debian's Slurm into the system (as root; nothing is started). Where it cannot be
# installed its tests are skipped.
set -eu
say() { printf 'exec-service: %s\n' "$*" >&2; }

if ! command -v slurmctld >/dev/null && [ ! -x /usr/sbin/slurmctld ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing Slurm"
        apt-get update -qq
        # Debian's packages start their services unless this file says no (101).
        if [ ! -e /usr/sbin/policy-rc.d ]; then
            printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
            chmod 755 /usr/sbin/policy-rc.d
            trap 'rm /usr/sbin/policy-rc.d' EXIT
        fi
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null || say "that failed"
    else
        say "no Slurm here: apt-get install slurm-wlm munge (root; Debian and Ubuntu)"
    fi
fi
