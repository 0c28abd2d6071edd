#!/bin/sh
# In the machine: its tier, the self-test, as root the tests that are marked `vm`, and the hostile programs that try to get out.
# What a tier lacks is skipped by name. Ends with a summary; 1 if anything is not as expected.
set -u
export CI=true EXEC_TEST_SLOWNESS=8 PYTHONPATH="$PWD" PYTHONDONTWRITEBYTECODE=1 EXEC_MIN_TIER=D
case $MACHINE in
no-landlock | delegated) wanted=C ;;
no-userns) wanted=D ;;
*) wanted=A ;;
esac
echo "kernel $(uname -r), control groups v2 with $(cat /sys/fs/cgroup/cgroup.controllers)"
.venv/bin/exec-service doctor | tee /tmp/doctor.log
tier=$(sed -n 's/^tier \(.\):.*/\1/p' /tmp/doctor.log)
{
    .venv/bin/python -c 'if True:
        import asyncio
        from exec_service.cli.common import check_pool
        from worker.config import WorkerConfig
        from worker.pool import Pool
        from worker.profiles import PROFILES
        async def main() -> None:
            async with Pool(WorkerConfig(slots=4, profiles={"bare": PROFILES["bare"]}, min_tier="D")) as pool:
                await check_pool(pool)
        asyncio.run(main())' 2>&1
    echo $? >/tmp/self.end
} | tee /tmp/self.log
{
    if [ "$(id -u)" = 0 ]; then
        .venv/bin/python -m pytest -q -rs -p no:cacheprovider --tb=short --color=no -m vm tests/worker 2>&1
        echo $? >/tmp/tests.end
    else
        echo "not run: they need root"
        echo 0 >/tmp/tests.end
    fi
} | tee /tmp/tests.log
{
    .venv/bin/python tests/hostile --alone --slow-machine --only '^b_02|^f_|^g_08|^k_11[4-9]|^k_14' 2>&1
    echo $? >/tmp/hostile.end
} | tee /tmp/hostile.log
echo
echo "tier:             $tier, expected $wanted"
echo "self-test:        $([ "$(cat /tmp/self.end)" = 0 ] && echo passed || tail -1 /tmp/self.log)"
echo "tests:            $(tail -1 /tmp/tests.log)"
grep -h '^FAILED\|^ERROR' /tmp/tests.log
echo "hostile programs: $(grep ' as expected, ' /tmp/hostile.log || tail -1 /tmp/hostile.log)"
grep -h -A1 '| NO$' /tmp/hostile.log
[ "$(cat /tmp/self.end /tmp/tests.end /tmp/hostile.end | tr -d "\n")$tier" = "000$wanted" ]
