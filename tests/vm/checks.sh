#!/bin/sh
# In the machine: the tests of isolation, then the hostile programs. Tests that need another kernel skip themselves and say why.
# Ends with a summary; 1 if anything is not as expected.
set -u
export CI=true EXEC_TEST_SLOWNESS=8 PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1
echo "kernel $(uname -r), control groups v2 with $(cat /sys/fs/cgroup/cgroup.controllers)"
.venv/bin/exec-service doctor | tail -1
{
    .venv/bin/python -m pytest -q -rs -p no:cacheprovider --tb=short --color=no \
        tests/worker/test_channels.py tests/worker/test_sandbox_*.py tests/worker/test_seccomp.py tests/worker/test_cgroups.py \
        tests/worker/test_time_and_blame.py tests/worker/test_session_tiers.py 2>&1
    echo $? >/tmp/tests.end
} | tee /tmp/tests.log
{
    .venv/bin/python tests/hostile --alone --slow-machine 2>&1
    echo $? >/tmp/hostile.end
} | tee /tmp/hostile.log
echo
echo "tests:            $(tail -1 /tmp/tests.log)"
grep -h '^FAILED\|^ERROR' /tmp/tests.log
echo "hostile programs: $(grep ' as expected, ' /tmp/hostile.log || tail -1 /tmp/hostile.log)"
grep -h -A1 '| NO$' /tmp/hostile.log
[ "$(cat /tmp/tests.end /tmp/hostile.end | tr -d "\n")" = 00 ]
