"""What the trainer records of its rollouts, and what the viewer's server says of them."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from service_harness import Service
from trainer_harness import TINY, rollout, samples, settings_at
from view_harness import MadeUpRun

from grpo_roc import config, rollout_log
from grpo_roc.__main__ import main
from grpo_roc.distributed import Ranks, pick_device
from grpo_roc.learner import Learner
from grpo_roc.loss import logprobs_and_entropies, pad
from grpo_roc.model import load_model
from grpo_roc.rollout_log import Group, Rollout, Step
from grpo_roc.runs import run_rl
from grpo_roc.view.run import PAGE, Filter, Run
from grpo_roc.view.server import make_viewer


@pytest.fixture
def made(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path)


def recorded(run: Path, step: int) -> list[Any]:
    lines = rollout_log.path(run, step).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Step | Group | Rollout) for line in lines]


# -- the record -----------------------------------------------------------------------------------------------------------


def test_every_rollout_is_recorded_with_the_reason_why_it_was_kept_or_dropped(made: MadeUpRun) -> None:
    rollouts = made.rollouts(1)
    rollouts[0].reward = None
    for one in rollouts[16:32]:
        one.reward = 0.0
    selected = made.write(1, rollouts)
    step, *lines = recorded(made.folder, 1)
    groups = [one for one in lines if isinstance(one, Group)]
    found = [one for one in lines if isinstance(one, Rollout)]
    assert (step.rule, step.eps, step.groups, len(groups), len(found)) == ("inverse", 0.05, 4, 4, 64)
    kept = {(one.group, one.sample): sample.advantage for one, sample in zip(selected.kept, selected.samples, strict=True)}
    assert {(one.group, one.sample) for one in found if one.verdict == "kept"} == kept.keys()
    assert all(one.advantage == pytest.approx(kept[one.group, one.sample], abs=1e-4) for one in found if one.verdict == "kept")
    assert found[0].verdict == "unknown" and {one.verdict for one in found[16:32]} == {"equal"}
    assert {one.verdict for one in found[1:16]} == {"kept", "not_drawn"}
    first = groups[0]
    assert (first.negative + first.positive, first.unknown, first.kept_negative + first.kept_positive) == (15, 1, 8)
    assert groups[1].kept_negative + groups[1].kept_positive == 0


def test_turns_are_apart_from_observations_and_calls_have_their_outcomes(made: MadeUpRun) -> None:
    rollouts = made.rollouts(0)
    made.write(0, rollouts)
    found = [one for one in recorded(made.folder, 0) if isinstance(one, Rollout)]
    for one, line in zip(rollouts, found, strict=True):
        assert "".join(text for part in line.parts for text in part.tokens) == made.codec.text(one.ids)
        assert [part.role for part in line.parts] == ["model", "tool"] * len(one.outcomes) + ["model"]
        calls = [call for part in line.parts for call in part.calls]
        assert [(call.outcome, call.status) for call in calls] == list(zip(one.outcomes, one.statuses, strict=True))
        assert sum(len(part.logprobs) for part in line.parts) == sum(len(part.entropies) for part in line.parts) == one.tokens
        assert all(not part.logprobs and not part.calls for part in line.parts if part.role == "tool")
    calls = [call for line in found for part in line.parts for call in part.calls]
    assert any(call.status == "parse_failure" and "not valid JSON" in call.failure for call in calls)
    assert any(call.code.startswith("print(") for call in calls)


def test_a_character_of_several_tokens_is_shown_whole(made: MadeUpRun) -> None:
    one = rollout(prompt=made.codec.ids("a"), ids=made.codec.ids("é∑x"), logprobs=[-1.0] * 6, mask=[1] * 6)
    assert len(one.ids) == 6, "the tiny tokenizer spells unknown letters in bytes"
    made.write(0, [one, rollout(0.0, sample=1)])
    (line, *_) = [one for one in recorded(made.folder, 0) if isinstance(one, Rollout)]
    assert line.parts[0].tokens[0].startswith("é") and "".join(line.parts[0].tokens) == "é∑x"


def test_a_step_that_is_too_large_has_whole_groups_only(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path, "record.step_mb=0.05")
    made.write(0)
    lines = recorded(tmp_path, 0)
    count = sum(isinstance(one, Group) for one in lines)
    assert 0 < count < 4 == lines[0].groups and sum(isinstance(one, Rollout) for one in lines) == 16 * count
    assert rollout_log.path(tmp_path, 0).stat().st_size <= 50_000


def test_a_long_run_keeps_steps_from_its_whole_length_within_the_bound(tmp_path: Path) -> None:
    made = MadeUpRun(tmp_path, "record.total_mb=0.5")
    for step in range(24):
        made.write(step)
    steps = rollout_log.steps(tmp_path)
    assert sum(rollout_log.path(tmp_path, step).stat().st_size for step in steps) <= 500_000
    assert steps[0] == 0 and steps[-1] == 23 and 3 < len(steps) < 24
    assert max(b - a for a, b in pairwise(steps)) <= 12


def test_a_bound_of_zero_records_nothing(tmp_path: Path) -> None:
    MadeUpRun(tmp_path, "record.step_mb=0").write(0)
    assert rollout_log.steps(tmp_path) == []


def test_a_resumed_run_drops_the_steps_that_run_again(made: MadeUpRun) -> None:
    for step in range(5):
        made.write(step)
    MadeUpRun(made.folder, first_step=3)
    assert rollout_log.steps(made.folder) == [0, 1, 2]


@pytest.mark.parametrize("packing", [False, True])
def test_the_learner_gives_each_samples_entropies_of_its_own_forward_pass(untaught: Path, packing: bool) -> None:
    model, every = load_model(untaught, TINY.model, pick_device()), samples()
    ids, mask = pad([one.ids for one in every]), pad([one.mask for one in every])
    entropies = logprobs_and_entropies(model, ids, mask)[1].detach()
    rl = msgspec.structs.replace(TINY.rl, micro_tokens=40, packing=packing, updates_per_rollout=2)
    learner = Learner(model, rl, Ranks(config.Parallel(), pick_device()))
    learner.update(every, 0)
    found = learner.take_entropies()
    for one, row, own in zip(found, entropies, mask[:, 1:] > 0, strict=True):
        assert one == pytest.approx(row[own].tolist(), abs=1e-4)
    assert learner.take_entropies() == [], "a step without samples has none"


def test_a_real_run_records_its_rollouts_with_entropies(taught: Path, live_service: Service, tmp_path: Path) -> None:
    asyncio.run(run_rl(settings_at(live_service, "rl.steps=2"), taught, tmp_path, eval_problems=4))
    found = [one for step in (0, 1) for one in recorded(tmp_path, step) if isinstance(one, Rollout)]
    assert len(found) == 2 * 16 and {one.weights for one in found} == {0, 1}
    for one in found:
        assert one.entropy_from == ("trainer" if one.verdict == "kept" else "engine")
        assert all(0 <= value < 10 for part in one.parts for value in part.entropies)
    assert max(value for one in found for part in one.parts for value in part.entropies) > 0.1


# -- the viewer's server --------------------------------------------------------------------------------------------------


@pytest.fixture
def viewer(made: MadeUpRun) -> Iterator[httpx.Client]:
    for step in range(4):
        made.write(step)
    server = make_viewer(made.folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with httpx.Client(base_url=server.url) as client:
        yield client
    server.shutdown()
    server.server_close()


def test_a_list_is_a_page_of_rows_without_tokens(viewer: httpx.Client) -> None:
    first = viewer.get("/api/rollouts").json()
    last = viewer.get("/api/rollouts?page=5").json()
    assert (first["found"], first["all"], len(first["rows"])) == (256, 256, PAGE)
    assert [row["step"] for row in first["rows"]] == [3] * PAGE and len(last["rows"]) == 256 - 5 * PAGE
    assert all("parts" not in row for row in first["rows"])


def test_filters_admit_by_outcome_step_and_problem(viewer: httpx.Client) -> None:
    def rows(**query: object) -> list[dict[str, Any]]:
        pages = [viewer.get("/api/rollouts", params={**query, "page": page}).json()["rows"] for page in range(6)]
        return [row for page in pages for row in page]

    every = rows()
    problem = every[0]["problem"]
    cases: dict[str, tuple[dict[str, object], Any]] = {
        "step": ({"step": 2}, lambda row: row["step"] == 2),
        "correct": ({"reward": "correct"}, lambda row: row["reward"] == 1),
        "wrong": ({"reward": "wrong"}, lambda row: row["reward"] == 0),
        "dropped": ({"verdict": "not_drawn"}, lambda row: row["verdict"] == "not_drawn"),
        "error": ({"calls": "error"}, lambda row: "error" in row["outcomes"]),
        "clean": ({"calls": "clean"}, lambda row: {*row["outcomes"]} == {"ok"}),
        "problem": ({"problem": problem.upper()}, lambda row: row["problem"] == problem),
    }  # fmt: skip
    for name, (query, wanted) in cases.items():
        found = rows(**query)
        assert found == [row for row in every if wanted(row)] and 0 < len(found) < 256, name


def test_a_rollout_comes_with_its_tokens_and_its_group(viewer: httpx.Client) -> None:
    found = viewer.get("/api/rollout?step=1&group=2&sample=5").json()
    assert (found["rollout"]["group"], found["rollout"]["sample"], found["step"]["step"]) == (2, 5, 1)
    assert (
        len(found["siblings"]) == 16
        and found["rollout"]["parts"][0]["tokens"]
        and found["group"]["prompt"].startswith("<|im_start|>")
    )


def test_curves_have_a_bounded_number_of_points(made: MadeUpRun) -> None:
    rows = [{"step": step, "reward/mean": step / 5000, "train/entropy": float("nan")} for step in range(5000)]
    (made.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    panels = {panel["title"]: panel["lines"][0]["points"] for panel in Run(made.folder).curves()}
    assert 300 < len(panels["reward"]) <= 400 and panels["reward"][-1][0] == 4999 and panels["entropy"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/rollout?step=9&group=0&sample=0", 404),
        ("/api/rollout?step=0&group=0&sample=99", 404),
        ("/api/rollouts?step=x", 400),
        ("/api/rollouts?other=1", 400),
        ("/api/rollout", 400),
        ("/page/../server.py", 404),
        ("/etc/passwd", 404),
    ],
)
def test_a_wrong_request_is_refused(viewer: httpx.Client, path: str, status: int) -> None:
    assert viewer.get(path).status_code == status


def test_other_hosts_and_other_machines_cannot_ask(viewer: httpx.Client) -> None:
    port = viewer.base_url.port
    assert viewer.get("/api/run", headers={"host": "attacker.example"}).status_code == 403
    assert viewer.get("/", headers={"host": f"attacker.example:{port}"}).status_code == 403
    assert viewer.get("/", headers={"host": f"localhost:{port}"}).status_code == 200
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", port or 0))


def test_the_page_may_load_nothing_from_elsewhere(viewer: httpx.Client) -> None:
    policy = viewer.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy and "http" not in policy


# -- runs that go on ------------------------------------------------------------------------------------------------------


def test_a_half_written_line_is_no_error_and_is_read_when_it_is_whole(made: MadeUpRun) -> None:
    made.write(0)
    made.write(1)
    path, rows = rollout_log.path(made.folder, 1), made.folder / "metrics.jsonl"
    whole, metrics = path.read_bytes(), rows.read_bytes()
    path.write_bytes(whole[:-40])
    rows.write_bytes(metrics[:-10])
    run = Run(made.folder)
    assert (run.overview()["rows"], run.overview()["troubles"], run.rollouts(Filter(step=1))["found"]) == (1, [], 63)
    path.write_bytes(whole)
    rows.write_bytes(metrics)
    assert (run.overview()["rows"], run.rollouts(Filter(step=1))["found"]) == (2, 64)


def test_a_resumed_run_replaces_what_it_wrote_before(made: MadeUpRun) -> None:
    for step in range(3):
        made.write(step)
    run = Run(made.folder)
    before = run.rollout(2, 0, 0)["rollout"]
    again = MadeUpRun(made.folder, first_step=2)
    assert [step for step, _ in run.overview()["steps"]] == [0, 1] and run.overview()["rows"] == 2
    again.write(2, [rollout(1.0), rollout(0.0, sample=1)])
    assert run.rollouts(Filter(step=2))["found"] == 2 and run.rollout(2, 0, 0)["rollout"] != before
    assert run.overview()["rows"] == 3


@pytest.mark.parametrize("damage", [b'{"kind":"step","format":2,"new":1}\n', b"\0\0\0\n"])
def test_a_step_that_cannot_be_read_is_named_and_the_others_are_shown(made: MadeUpRun, damage: bytes) -> None:
    made.write(0)
    rollout_log.path(made.folder, 1).write_bytes(damage)
    run = Run(made.folder)
    (trouble,) = run.overview()["troubles"]
    assert trouble.startswith("step 1 ") and run.rollouts(Filter())["all"] == 64


def test_the_command_names_the_runs_below_a_folder_without_one(made: MadeUpRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.write(0)
    assert main(["view", str(made.folder.parent)]) == 2
    assert str(made.folder) in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["view", str(made.folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capsys.readouterr().err
