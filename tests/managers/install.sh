#!/bin/sh
# Installs what tests/managers runs on, once: Debian's Slurm into the system (as root; nothing is started), and Ray into
# .venvs/managers, which has the packages of .venv too. Where Slurm cannot be installed its tests are skipped.
set -eu
cd "$(dirname "$0")/../.."
venv=.venvs/managers
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

wanted=$(cat deploy/ray-constraints.txt .venv/installed-dev | cksum)
[ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ] || exit 0
say "installing Ray into $venv"
.venv/bin/python -m venv --clear "$venv"
site='import sysconfig; print(sysconfig.get_paths()["purelib"])'
printf 'import site; site.addsitedir("%s")\n' "$(.venv/bin/python -c "$site")" > "$("$venv/bin/python" -c "$site")/service.pth"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c deploy/ray-constraints.txt ray
printf '%s\n' "$wanted" > "$venv/installed"
