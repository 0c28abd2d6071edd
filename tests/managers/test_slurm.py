"""The batch script under a real Slurm with three nodes on this machine: serves, survives a lost node, leaves nothing."""

import shlex
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from calls_harness import CALLS, run_while, service_of
from common import wait_until
from slurm_harness import SCRIPT, Slurm, files_of_user, need_slurm, processes_of_user

from exec_client import Client

pytestmark = [pytest.mark.slow, pytest.mark.alone]
SETTINGS = {"EXEC_PROFILES": '{"bare": []}', "EXEC_SLOTS": "2"}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm() as slurm:
        yield slurm


@pytest.fixture(autouse=True)
def without_files() -> Iterator[None]:
    yield
    for folder in files_of_user():
        shutil.rmtree(folder)


def client_of(slurm: Slurm, file: Path) -> Client:
    named = service_of(wait_until(lambda: file.exists() and file, slurm.logs, 300))
    return Client(named["EXEC_URL"], api_key=named["EXEC_API_KEY"])


def cancel(slurm: Slurm, job: str) -> None:
    slurm.run("scancel", job)
    wait_until(lambda: slurm.state(job) == "CANCELLED", slurm.logs)
    wait_until(lambda: not processes_of_user(), lambda: "\n".join(processes_of_user()))


def test_ten_thousand_calls_survive_the_loss_of_a_node(slurm: Slurm) -> None:
    job = slurm.submit("--nodes=3", str(SCRIPT), variables=SETTINGS)
    file = slurm.home / f"exec-service-{job}.env"
    with client_of(slurm, file) as client:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        wait_until(lambda: client.info().workers == 3, slurm.logs, 300)
        lost = run_while(client, CALLS, lambda: slurm.lose("n3"))
        assert lost == []
        assert client.info().workers == 2
    wait_until(lambda: "down" in slurm.run("sinfo", "-h", "-n", "n3", "-o", "%T"), slurm.logs)
    assert slurm.state(job) == "RUNNING"
    cancel(slurm, job)
    assert not file.exists()
    assert len(files_of_user()) == 1  # of the node that was lost
    slurm.start_node("n3")


def test_a_step_beside_a_training_job_serves_it_on_a_share_of_the_cores(slurm: Slurm) -> None:
    file = slurm.home / "beside.env"
    training = slurm.home / "training.sbatch"
    program = (
        "import os; from exec_client import Client\n"
        "print(Client(os.environ['EXEC_URL']).run('print(6 * 7)', deadline_s=200).stdout)"
    )
    training.write_text(
        "#!/bin/bash\n"
        f"CORES=1 bash {SCRIPT} {file} &\n"
        f"while [ ! -e {file} ]; do sleep 0.2; done; set -a; . {file}; set +a\n"
        f"srun --ntasks=3 --ntasks-per-node=1 --cpus-per-task=1 python -c {shlex.quote(program)}\n"
        "kill %1; wait\n"
    )
    job = slurm.submit("--nodes=3", "--ntasks-per-node=2", str(training), variables={"EXEC_PROFILES": '{"bare": []}'})
    wait_until(lambda: slurm.state(job) == "COMPLETED", slurm.logs, 300)
    assert (slurm.home / f"{job}.log").read_text().count("42\n") == 3
    wait_until(lambda: not processes_of_user(), lambda: "\n".join(processes_of_user()))
    assert files_of_user() == []
