"""The command line as a user meets it: what it prints, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from common import wait_until
from service_harness import COMMAND, ROOT, Service, children_of, command, environment, serving, tree_of

from exec_wire.messages.calls import decode_result
from loadtest.support.processes import free_port
from worker.sandbox.tiers import ALL_LAYERS

BARE = {"profiles": '{"bare": []}'}


def test_run_reads_a_file_shows_what_the_program_printed_and_ends_as_it_did(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(7)\n")
    ended = command("run", str(file), **BARE)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("out\n", "err\n", 7)


def test_run_reads_the_program_from_standard_input() -> None:
    ended = command("run", "-", stdin="print(6 * 7)", **BARE)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("42\n", "", 0)


def test_run_prints_the_whole_result_as_json() -> None:
    ended = command("run", "--json", "-c", "print(1)\nraise SystemExit(3)", **BARE)
    result = decode_result(ended.stdout)
    assert (result.status, result.stdout, result.exit_code, result.sandbox.tier) == ("error", "1\n", 3, "A")
    assert ended.returncode == 3


def test_run_asks_a_running_service(service: Service) -> None:
    ended = command("run", "--url", service.url, "--json", "-c", "print(6 * 7)")
    result = decode_result(ended.stdout)
    assert (result.stdout, result.worker, ended.returncode) == ("42\n", "embedded", 0)


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("import os\nos.kill(os.getpid(), 15)", 128 + 15, "signal"),
        ("import time\ntime.sleep(30)", 124, "timeout"),  # asleep: not one that stood in line for a CPU
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
    ids=["signal", "time-out", "exception"],
)
def test_exit_code_says_how_it_ended(service: Service, code: str, exit_code: int, words: str) -> None:
    ended = command("run", "--url", service.url, "--wall", "1", "-c", code)
    assert (ended.returncode, words in ended.stderr) == (exit_code, True), ended.stderr
    assert "site-packages" not in ended.stderr


KILLED_BY_NOBODY_KNOWS_WHOM = "import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)"


@pytest.mark.parametrize("of_a_service", [False, True])
def test_end_that_is_our_fault_is_75(service: Service, of_a_service: bool) -> None:
    ended = command("run", *["--url", service.url] * of_a_service, "-c", KILLED_BY_NOBODY_KNOWS_WHOM, **BARE)
    assert (ended.returncode, ended.stdout) == (75, "1\n")
    assert "blame: infra" in ended.stderr


def test_run_without_a_service_at_the_url_is_unavailable() -> None:
    ended = command("run", "--url", "http://127.0.0.1:9", "-c", "print(1)")
    assert ended.returncode == 69
    assert ended.stderr.startswith("exec-service: ")
    assert "Traceback" not in ended.stderr


def test_run_in_a_sandbox_weaker_than_wanted_is_unavailable_with_words() -> None:
    ended = command("run", "-c", "print(1)", mask_layers='["userns", "landlock"]', **BARE)
    assert (ended.returncode, ended.stdout) == (69, "")
    assert "landlock (masked by configuration)" in ended.stderr


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "x", "-c", "y"], ["run", "/no/such/file"], ["run", "--wall", "0", "-c", ""]]
)
def test_wrong_usage_of_run_is_2_with_words(arguments: list[str]) -> None:
    ended = command(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr
    assert "Traceback" not in ended.stderr


# Names its own process, so that it can be told from the programs by which the sandbox is probed before it.
NAMED = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'the-program')\ntime.sleep(300)"


def start_run(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "run", "--wall", "300", "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**BARE),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job starts with it ignored
    )


def zygote_of_program(process: subprocess.Popen[str]) -> int:
    """The pid of the zygote in which the program runs, as soon as it has named itself."""
    zygotes: list[int] = []

    def runs() -> bool:
        assert process.poll() is None, process.communicate()
        zygotes[:] = [
            zygote
            for runner in children_of(process.pid)
            for jail in children_of(runner)
            for zygote in children_of(jail)
            if any(name_of(below) == "the-program" for below in tree_of(zygote))
        ]
        return bool(zygotes)

    wait_until(runs, "the program runs", 60)
    return zygotes[0]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_ctrl_c_during_run_is_130_and_leaves_nothing() -> None:
    with start_run(NAMED) as process:
        zygote = zygote_of_program(process)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (130, "")
    wait_until(lambda: not Path(f"/proc/{zygote}").exists(), "the interpreter is gone")


def test_lost_interpreter_during_run_is_75_with_words() -> None:
    with start_run(NAMED) as process:
        os.kill(zygote_of_program(process), signal.SIGKILL)
        _, words = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Traceback" not in words


def test_doctor_finds_every_layer_here() -> None:
    ended = command("doctor")
    assert ended.returncode == 0, ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines() if line]
    for what in ("kernel", "python", "nsjail", "packages", *ALL_LAYERS):
        assert next(line for line in lines if line[0] == what)[1] == "ok"
    assert lines[-1][:2] == ["tier", "A:"]
    assert "\x1b" not in ended.stdout  # colours only on a terminal


def test_doctor_reports_as_json() -> None:
    ended = command("doctor", "--json", "--port", "9")
    report = json.loads(ended.stdout)
    assert (ended.returncode, report["tier"]) == (0, "A")
    assert {finding["what"]: finding["state"] for finding in report["findings"]}.items() >= dict.fromkeys(
        ALL_LAYERS, "ok"
    ).items()
    assert any(finding["what"] == "port 9" for finding in report["findings"])


def test_doctor_without_control_groups_is_content_and_says_what_would_bring_them() -> None:
    ended = command("doctor", "--json", mask_layers='["cgroup"]')
    report = json.loads(ended.stdout)
    missing = {finding["what"]: finding for finding in report["findings"] if finding["state"] == "missing"}
    assert (ended.returncode, report["tier"], list(missing)) == (0, "B", ["cgroup"])
    assert missing["cgroup"]["why"] == "masked by configuration"
    assert "/sys/fs/cgroup" in missing["cgroup"]["fix"]


@pytest.mark.parametrize(
    ("layer", "tier", "code"), [("uid", "C", 1), ("userns", "D", 1), ("landlock", "C", 1), ("seccomp", "E", 69)]
)
def test_doctor_below_tier_b_does_not_end_with_0_and_names_the_fix(layer: str, tier: str, code: int) -> None:
    ended = command("doctor", mask_layers=json.dumps([layer]))
    assert ended.returncode == code
    lines = ended.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(layer))
    assert lines[at].split(maxsplit=2)[1:] == ["missing", "masked by configuration"]
    assert lines[at + 1].strip().startswith("->")
    assert lines[-1].startswith(f"tier {tier}:")


def test_up_on_a_taken_port_is_69_and_names_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = command("up", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 69
    assert "Address already in use" in ended.stderr
    assert "--port 9000" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_up_on_an_address_that_others_reach_is_refused_with_words(host: str) -> None:
    ended = command("up", "--port", "0", "--host", host)
    assert ended.returncode == 2
    assert f"refusing to listen on '{host}'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [(["--version"], "exec-service "), *(([*name, "--help"], "usage: exec-service") for name in ([], ["up"], ["run"]))],
)
def test_version_and_help_are_given(arguments: list[str], begin: str) -> None:
    ended = command(*arguments)
    assert ended.returncode == 0
    assert ended.stdout.startswith(begin)


def test_no_command_is_wrong_usage() -> None:
    ended = command()
    assert ended.returncode == 2
    assert "usage: exec-service" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--port", "70000"], "--port: '70000' is not allowed; a whole number from 0 to 65535 is"),
        (["doctor", "--port", "http"], "--port: 'http' is not allowed; a whole number from 0 to 65535 is"),
        (["up", "--slots", "0"], "EXEC_SLOTS (setting slots) is 0; allowed: a whole number at least 1 and at most 1023"),
        (["run", "--wall", "0", "-c", ""], "--wall: '0' is not allowed; a number of seconds, more than 0 and at most 3600, is"),
        (["keys", "add", "--file", "k", "--tenant", "t", "--max-limit", "memory=5"], "for wall_s, cpu_s, memory_mb"),
    ],
)
def test_a_value_that_is_not_allowed_is_answered_with_those_that_are(arguments: list[str], words: str) -> None:
    ended = command(*arguments)
    assert ended.returncode == 2 and words in ended.stderr, ended.stderr


def test_a_port_in_the_environment_that_is_not_allowed_is_answered_with_those_that_are() -> None:
    ended = command("up", port="eighty")
    assert ended.returncode == 2
    assert "EXEC_PORT (setting port) is 'eighty'; allowed: a whole number at least 0 and at most 65535" in ended.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("uvloop", ["up", "--grpc-port", "0"], "server"),
        ("fastapi", ["gateway", "--redis", "redis://127.0.0.1:9"], "server"),
        ("celery", ["jobs-worker", "--redis", "redis://127.0.0.1:9", "--jobs-dir", "/tmp"], "server"),
    ],
)
def test_a_missing_extra_is_one_sentence_that_names_what_to_install(module: str, arguments: list[str], extra: str) -> None:
    without = f"import sys; sys.modules[{module!r}] = None; from exec_service.__main__ import main; main({arguments!r})"
    ended = subprocess.run(
        [*COMMAND[:1], "-c", without], capture_output=True, text=True, cwd=ROOT, env=environment(log_format="text"), timeout=60
    )
    assert ended.returncode == 69
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    line = ended.stderr.strip()
    assert f"{module!r} is not installed" in line and f"pip install 'exec-service[{extra}]'" in line


def test_commands_that_only_a_checkout_has_are_not_offered() -> None:
    words = command("--help").stdout
    assert not [name for name in ("bench", "calibrate", "plan") if re.search(rf"^ +{name} ", words, re.M)]
    assert command("plan").returncode == 2


def test_run_passes_its_standard_input_on() -> None:
    ended = command("run", "-c", "print(input()[::-1])", stdin="olleh\n", **BARE)
    assert (ended.stdout, ended.returncode) == ("hello\n", 0)


def test_run_takes_the_language_of_the_program(service: Service) -> None:
    ended = command("run", "--language", "bash", "-c", "read name; echo hello $name", stdin="you\n", **BARE)
    assert (ended.stdout, ended.returncode) == ("hello you\n", 0)
    for where in ([], ["--url", service.url]):
        ended = command("run", *where, "--language", "cobol", "-c", "", **BARE)
        assert ended.returncode == 2 and "cobol" in ended.stderr and "python" in ended.stderr


def test_doctor_says_its_exit_codes() -> None:
    ended = command("doctor", "--help")
    assert (ended.returncode, ended.stdout.startswith("usage: exec-service")) == (0, True)
    assert "0 the full sandbox (tier A or B), 1 a weaker one (C or D)" in " ".join(ended.stdout.split())


def test_metrics_have_a_port_of_their_own_if_one_is_named() -> None:
    port = free_port()
    with serving("--metrics-port", str(port)):
        assert "exec_calls_total" in httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").text == "ready\n"
