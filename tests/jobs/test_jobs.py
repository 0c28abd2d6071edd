"""Bulk jobs as a caller meets them, on one machine: chunks are run beside the gateway."""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_harness import problem, running, until
from jobs_harness import LINES, Jobs, body, calls, jobs_running

from exec_service.api.jobs import BulkJobs, in_thread
from exec_service.jobs import chunks, scheduler
from exec_service.jobs import store as job_files
from exec_service.jobs.store import Heartbeat, JobMeta, JobStore
from exec_service.refusals import Refusal
from exec_service.tenants.keys import add_key, read_keys, remove_key
from exec_wire.messages.calls import verdict
from exec_wire.messages.jobs import JobResult


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    async with jobs_running(tmp_path, jobs_chunk_items=10) as jobs:
        yield jobs


async def test_every_item_has_one_result_in_the_order_of_the_input(jobs: Jobs) -> None:
    submitted = await jobs.submit(calls(*(f"say {number}" for number in range(95))), name="first")
    assert (submitted.items, submitted.chunks, submitted.state, submitted.name) == (95, 10, "running", "first")
    ended = await jobs.until(submitted.id, "done")
    assert (ended.done, ended.chunks_done, ended.outcomes, ended.trouble) == (95, 10, {"ok": 95}, "")
    results = await jobs.results(submitted.id)
    assert [(result.item, result.call and result.call.stdout) for result in results] == [(n, str(n)) for n in range(95)]
    assert {call.priority for call in jobs.service.worker.calls} == {"bulk"}


async def test_calls_judgements_and_verifications_may_be_mixed(jobs: Jobs) -> None:
    judge = {"judge": {"code": "echo", "tests": [{"stdin": "1", "expected": "1"}, {"stdin": "2", "expected": "3"}]}}
    verify = {"verify": {"answer": "7", "truth": "7", "kind": "numeric"}}
    job = await jobs.submit([*calls("fail"), judge, verify])
    assert (await jobs.until(job.id, "done")).outcomes == {"error": 1, "WA": 1, "equal": 1}
    call, judged, verified = await jobs.results(job.id)
    assert call.call is not None and call.call.blame == "model"
    assert judged.judge is not None and judged.judge.score == 0.5
    assert verified.verify is not None and verified.verify.equal is True


async def test_unknown_fields_of_items_are_told_when_the_job_is_submitted(jobs: Jobs) -> None:
    odd = [{"call": {"code": "say 0"}}, {"call": {"code": "say 1", "limits": {"wall": 1}}, "nmae": "x"}]
    submitted = await jobs.submit(odd)
    assert submitted.warnings == ["[1].nmae: unknown field", "[1].call.limits.wall: unknown field, did you mean wall_s?"]
    assert (await jobs.until(submitted.id, "done")).outcomes == {"ok": 2}


async def test_only_failures_of_the_service_are_tried_again(jobs: Jobs) -> None:
    judge = {"judge": {"code": "flaky 5", "tests": [{"stdin": "7", "expected": "7"}]}}
    job = await jobs.submit([{"call": {"code": "flaky 2", "stdin": "x"}}, *calls("fail", "end timeout"), judge])
    await jobs.until(job.id, "done")
    flaky, failed, late, judged = await jobs.results(job.id)
    assert judged.judge is not None and judged.judge.verdict == "AC"
    assert flaky.call is not None and (flaky.call.status, flaky.call.stdout) == ("ok", "x")
    assert failed.call is not None and late.call is not None
    assert (failed.call.status, late.call.status) == ("error", "timeout")
    times = {"end timeout": 1, "fail": 1, "flaky 2": 3, "flaky 5": 6}
    assert Counter(jobs.service.worker.codes) == times


async def test_item_that_the_service_keeps_failing_at_is_told_apart(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ATTEMPTS", 1)  # each of five
    job = await jobs.submit(calls("lose", "say 1"))
    assert (await jobs.until(job.id, "done")).outcomes == {"worker_lost": 1, "ok": 1}
    lost = (await jobs.results(job.id))[0].call
    assert lost is not None and (lost.blame, lost.retryable) == ("infra", True)


@pytest.mark.parametrize(
    ("line", "code", "field", "words"),
    [
        ('{"call": {"code": 7}}', "bad_field", "$[2].call.code", "line 3"),
        ('{"call": {"code": "", "language": "cobol"}}', "unknown_language", "$[2].call.language", "cobol"),
        ('{"judge": {"code": "", "tests": []}}', "bad_field", "$[2].judge.tests", "line 3"),
        ('{"verify": {"answer": "1"}}', "bad_field", "$[2].verify.truth", "line 3"),
        ('{"call": {"code": ""}, "verify": {"answer": "1", "truth": "1"}}', "bad_field", "$[2]", "exactly one"),
        ('{"code": "print(1)"}', "bad_field", "$[2]", "exactly one"),
        ("print(1)", "bad_json", "$[2]", "line 3"),
    ],
)
async def test_a_wrong_line_is_named_and_nothing_is_kept(jobs: Jobs, line: str, code: str, field: str, words: str) -> None:
    response = await jobs.post(body(calls("say 1", "say 2")) + line.encode() + b"\n" + body(calls("say 3")))
    said = problem(response, 400 if code == "bad_json" else 422, code)
    assert (said["field"], words in said["detail"]) == (field, True), said
    assert (await jobs.ask("GET", "")).json() == {"jobs": []}
    assert list(jobs.store.folder.iterdir()) == []


async def test_sizes_types_and_emptiness_are_refused(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, run=False, jobs_max_items=3, jobs_max_bytes=5000, max_body_bytes=2000) as jobs:
        problem(await jobs.post(b"\n \n"), 400, "bad_json")
        problem(await jobs.post(body(calls(*"1234"))), 413, "too_many_calls")
        problem(await jobs.post(body(calls("x" * 2500))), 413, "body_too_large")
        problem(await jobs.post(body(calls(*["x" * 1800] * 3))), 413, "body_too_large")
        problem(await jobs.service.client.post("/v1/jobs", json={}), 415, "wrong_content_type")
        assert (await jobs.ask("GET", "")).json() == {"jobs": []}


async def test_a_body_that_comes_in_odd_pieces_is_read_as_its_lines(jobs: Jobs) -> None:
    content = body(calls("say ä", "say \u2028", "say 3")).replace(b"\n", b"\r\n").rstrip()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(content), 7):
            yield content[at : at + 7]

    response = await jobs.post(pieces())
    assert response.status_code == 201, response.text
    job = response.json()["id"]
    await jobs.until(job, "done")
    assert [result.call and result.call.stdout for result in await jobs.results(job)] == ["ä", "\u2028", "3"]


async def test_without_a_folder_the_caller_is_told_what_is_missing() -> None:
    async with running() as service:
        said = problem(await service.client.post("/v1/jobs", content=b"{}", headers=LINES), 501, "jobs_off")
        assert "--jobs-dir" in said["detail"]


@pytest.mark.parametrize("job", ["20260101000000-0123456789ab", "nonsense", "..%2f..%2fetc", ".new-x"])
async def test_an_unknown_job_is_not_found(jobs: Jobs, job: str) -> None:
    for verb, path in (("GET", ""), ("GET", "/results"), ("POST", "/pause"), ("POST", "/cancel"), ("DELETE", "")):
        assert (await jobs.ask(verb, f"/{job}{path}")).status_code == 404


async def test_paused_job_begins_nothing_and_goes_on_where_it_was(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, jobs_chunk_items=6, at_once=2) as jobs:
        worker = jobs.service.worker
        job = await jobs.submit(calls("say 0", "say 1", "hold", "hold", "say 4", "say 5", "say 6"))
        await until(lambda: worker.codes.count("hold") == 2)
        assert (await jobs.ask("POST", f"/{job.id}/pause")).json()["state"] == "paused"
        await until(lambda: len(worker.cancelled) == 2 and not jobs.store.running(job.id))
        paused = await jobs.status(job.id)
        assert (paused.state, paused.done) == ("paused", 2)
        assert [result.item for result in await jobs.results(job.id)] == [0, 1]
        await asyncio.sleep(1.2)
        assert len(worker.calls) == 4
        worker.let_go.set()
        assert (await jobs.ask("POST", f"/{job.id}/resume")).json()["state"] == "running"
        await jobs.until(job.id, "done")
        assert [result.item for result in await jobs.results(job.id)] == list(range(7))
        assert worker.codes.count("say 0") == worker.codes.count("say 1") == 1


async def test_cancelled_job_keeps_what_is_done_and_can_be_removed(jobs: Jobs) -> None:
    job = await jobs.submit(calls(*["say x"] * 10, "say y", "hold"))
    await until(lambda: "hold" in jobs.service.worker.codes)
    problem(await jobs.ask("DELETE", f"/{job.id}"), 409, "job_running")
    assert (await jobs.ask("POST", f"/{job.id}/cancel")).json()["state"] == "cancelled"
    await until(lambda: len(jobs.service.worker.cancelled) == 1 and not jobs.store.running(job.id))
    assert [result.item for result in await jobs.results(job.id)] == list(range(11))
    problem(await jobs.ask("POST", f"/{job.id}/resume"), 409, "job_ended")
    assert (await jobs.ask("DELETE", f"/{job.id}")).json() == {"removed": job.id}
    problem(await jobs.ask("GET", f"/{job.id}"), 404, "no_such_job")


async def test_results_can_be_followed_while_the_job_runs(jobs: Jobs) -> None:
    job = await jobs.submit(calls(*["say x"] * 10, "hold"))
    arrived: list[int] = []
    async with jobs.service.client.stream("GET", f"/v1/jobs/{job.id}/results?follow=true") as response:
        async for line in response.aiter_lines():
            arrived.append(json.loads(line)["item"])
            if len(arrived) == 10:
                running = await jobs.status(job.id)
                assert (running.state, running.chunks_done) == ("running", 1)
                assert running.items_per_s is None or running.eta_s is not None
                jobs.service.worker.let_go.set()
    assert arrived == list(range(11))


async def test_interactive_calls_pass_a_bulk_job(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, at_once=64) as jobs:
        await jobs.submit(calls(*(f"say {number}" for number in range(2000))))
        await until(lambda: bool(jobs.service.worker.calls))
        for _ in range(10):
            assert (await jobs.service.run("say now")).json()["stdout"] == "now"
        assert len(jobs.service.worker.calls) < 2000


async def test_job_belongs_to_its_tenant_and_runs_as_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = {tenant: add_key(keys, tenant, max_limits={"wall_s": 20})[0] for tenant in ("lab", "rival")}
    async with jobs_running(tmp_path, keys=str(keys)) as open_jobs:
        lab, rival = (Jobs(open_jobs.service, {"authorization": f"Bearer {secrets[name]}"}) for name in ("lab", "rival"))
        problem(await open_jobs.post(body(calls("say 1"))), 401, "unauthenticated")
        problem(await lab.post(body([{"call": {"code": "", "tenant": "rival"}}])), 403, "foreign_tenant")
        said = problem(await lab.post(body([{"call": {"code": "", "limits": {"wall_s": 30}}}])), 403, "beyond_limits")
        assert said["field"] == "$[0].call.limits.wall_s"
        job = await lab.submit(calls("say 1", "say 2"))
        for verb, path in (("GET", ""), ("GET", "/results"), ("POST", "/pause"), ("POST", "/cancel"), ("DELETE", "")):
            problem(await rival.ask(verb, f"/{job.id}{path}"), 404, "no_such_job")
        assert (await rival.ask("GET", "")).json() == {"jobs": []}
        await lab.until(job.id, "done")
        assert {call.tenant for call in open_jobs.service.worker.calls} == {"lab"}


async def test_jobs_and_items_of_a_tenant_are_bounded_and_those_of_others_do_not_count(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = {tenant: add_key(keys, tenant)[0] for tenant in ("lab", "rival")}
    async with jobs_running(tmp_path, keys=str(keys), run=False, jobs_max_live=2, jobs_max_kept_items=10) as open_jobs:
        lab, rival = (Jobs(open_jobs.service, {"authorization": f"Bearer {secrets[name]}"}) for name in ("lab", "rival"))
        first, _ = await lab.submit(calls("say 1")), await lab.submit(calls(*["say 2"] * 5))
        refused = await lab.post(body(calls("say 3")))
        assert "at most 2" in problem(refused, 429, "too_many_jobs")["detail"] and int(refused.headers["retry-after"]) > 0
        await rival.submit(calls(*["say 3"] * 10))
        await lab.ask("POST", f"/{first.id}/cancel")  # it has ended, and is kept
        said = problem(await lab.post(body(calls(*["say 4"] * 5))), 413, "jobs_full")
        assert "6 items" in said["detail"] and "DELETE" in said["detail"]
        await lab.ask("DELETE", f"/{first.id}")
        await lab.submit(calls(*["say 4"] * 5))
        assert len((await lab.ask("GET", "")).json()["jobs"]) == 2


async def test_jobs_that_come_at_the_same_time_do_not_pass_the_bounds_together(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, run=False, jobs_max_live=3, jobs_max_kept_items=8) as jobs:
        answers = await asyncio.gather(*(jobs.post(body(calls(*["say 1"] * 4))) for _ in range(6)))
        assert sorted({answer.status_code for answer in answers}) in ([201, 429], [201, 413, 429])
        assert sum(answer.status_code == 201 for answer in answers) == len(jobs.store.ids()) <= 2


async def test_ticket_opens_only_what_runs_programs_and_only_while_its_job_runs(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret, entry = add_key(keys, "lab")
    add_key(keys, "rival")
    async with jobs_running(tmp_path, keys=str(keys), run=False) as open_jobs:
        lab = Jobs(open_jobs.service, {"authorization": f"Bearer {secret}"})
        job = await lab.submit(calls("say 1"))
        token = open_jobs.store.token(job.id)

        async def batch(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            return (await open_jobs.service.client.post("/v1/batch", json={"calls": []}, headers=headers)).status_code

        assert await batch(token) == 200
        assert await batch(token[:-1] + "x") == await batch(f"exj_{job.id}.") == await batch("exj_../x.y") == 401
        as_job = Jobs(open_jobs.service, {"authorization": f"Bearer {token}"})
        for verb, path in (("GET", ""), ("GET", f"/{job.id}/results"), ("POST", f"/{job.id}/cancel")):
            problem(await as_job.ask(verb, path), 401, "unauthenticated")
        remove_key(keys, entry.id)
        async with asyncio.timeout(30):
            while await batch(token) != 401:  # noqa: ASYNC110 - the gateway decides
                await asyncio.sleep(0.1)
        assert [known.tenant for known in read_keys(keys).keys] == ["rival"]


async def test_ticket_is_gone_when_the_job_has_ended(jobs: Jobs) -> None:
    store = jobs.store
    done, cancelled = await jobs.submit(calls("say 1")), await jobs.submit(calls("hold"))
    assert store.token(done.id)
    await jobs.ask("POST", f"/{cancelled.id}/cancel")
    await jobs.until(done.id, "done")
    await until(lambda: not store.token(done.id) and not store.token(cancelled.id))


async def test_job_that_cannot_go_on_says_why_and_is_tried_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "TROUBLE_S", 1.2)
    monkeypatch.setattr("exec_service.tenants.keys.REREAD_S", 0.05)
    keys = tmp_path / "keys.json"
    secret, entry = add_key(keys, "lab")
    add_key(keys, "rival")
    async with jobs_running(tmp_path, keys=str(keys), jobs_chunk_items=1) as open_jobs:
        lab = Jobs(open_jobs.service, {"authorization": f"Bearer {secret}"})
        job = await lab.submit(calls("hold", *["say 1"] * 5))
        await until(lambda: "hold" in open_jobs.service.worker.codes)
        remove_key(keys, entry.id)
        await asyncio.sleep(0.3)
        open_jobs.service.worker.let_go.set()
        await until(lambda: "no longer has a key" in open_jobs.store.trouble(job.id))
        await asyncio.sleep(1.5)
        assert 1 <= sum("cannot continue" in record.message for record in caplog.records) <= 3
        add_key(keys, "lab")
        await until(lambda: len(open_jobs.store.chunks_done(job.id)) == 6, 10)
        assert open_jobs.store.trouble(job.id) == ""


async def test_job_goes_on_with_the_next_gateway(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, jobs_chunk_items=2, at_once=1) as jobs:
        job = await jobs.submit(calls("say 0", "say 1", "say 2", "hold"))
        await until(lambda: "hold" in jobs.service.worker.codes)
    async with jobs_running(tmp_path) as jobs:
        jobs.service.worker.let_go.set()
        await jobs.until(job.id, "done")
        assert [result.item for result in await jobs.results(job.id)] == [0, 1, 2, 3]
        assert jobs.service.worker.codes == ["hold"]


async def test_chunk_whose_runner_is_silent_is_handed_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STALE_S", 0.8)
    async with jobs_running(tmp_path, run=False) as jobs:
        job = await jobs.submit(calls("say 1"))
    assert JobStore(tmp_path / "jobs").begin(job.id, 1, Heartbeat("died", 3, 0))
    async with jobs_running(tmp_path) as jobs:
        assert (await jobs.until(job.id, "done")).outcomes == {"ok": 1}


def test_chunk_that_is_run_twice_counts_once(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with store.draft("") as draft:
        draft.add_chunk([b"{}", b"{}"])
        meta = draft.finish()
    first, second = ([JobResult(n, call=verdict("ok", stdout=who)) for n in (1, 0)] for who in ("first", "second"))
    assert store.begin(meta.id, 1, Heartbeat("a", 0, 0)) and not store.begin(meta.id, 1, Heartbeat("b", 0, 0))
    store.save(meta.id, 1, first)
    store.save(meta.id, 1, second)
    path = store.result_file(meta.id, 1)
    assert path is not None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["item"], line["call"]["stdout"]) for line in lines] == [(0, "first"), (1, "first")]
    assert (store.outcomes(meta.id, {1}), store.state(meta)) == ({"ok": 2}, "done")


def finished_job(store: JobStore, chunks: int) -> JobMeta:
    with store.draft("") as draft:
        for _ in range(chunks):
            draft.add_chunk([b"{}"])
        meta = draft.finish()
    for chunk in range(1, chunks + 1):
        store.save(meta.id, chunk, [JobResult(chunk - 1, call=verdict("ok"))])
    return meta


def test_outcomes_are_counted_once_though_several_clients_ask_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_slowly(content: bytes, decode: Callable[[bytes], dict[str, int]] = job_files._decode_outcomes) -> dict[str, int]:
        time.sleep(0.02)  # so that all clients are counting
        return decode(content)

    monkeypatch.setattr(job_files, "_decode_outcomes", decode_slowly)
    desk = BulkJobs(JobStore(tmp_path))
    meta = finished_job(desk.store, chunks=5)
    together = threading.Barrier(4)

    def ask(_: int) -> dict[str, int]:
        together.wait(30)
        return desk.status(meta).outcomes

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(ask, range(4)))
    assert desk.status(meta).outcomes == {"ok": 5}


async def test_status_of_a_job_that_another_gateway_removes_meanwhile_is_no_such_job(tmp_path: Path) -> None:
    desk = BulkJobs(JobStore(tmp_path))
    meta = finished_job(desk.store, chunks=1)
    assert desk.status(meta).outcomes == {"ok": 1}
    JobStore(tmp_path).remove(meta.id)
    with pytest.raises(Refusal) as refused:
        await in_thread(desk.status, meta)
    assert refused.value.code == "no_such_job"


async def test_outcomes_of_a_removed_job_are_forgotten_whoever_removed_it(jobs: Jobs) -> None:
    here, elsewhere = await jobs.submit(calls("say 1")), await jobs.submit(calls("say 2"))
    for job in (here, elsewhere):
        await jobs.until(job.id, "done")
    assert jobs.store._counted.keys() == {here.id, elsewhere.id}
    await jobs.ask("DELETE", f"/{here.id}")
    JobStore(jobs.store.folder).remove(elsewhere.id)
    await until(lambda: not jobs.store._counted)


@pytest.mark.parametrize(("change", "readable"), [({}, True), ({"version": 1}, True), ({"version": 2, "chunks": "x"}, False)])
async def test_folder_of_a_newer_version_is_refused_and_one_without_counts_as_the_first(
    tmp_path: Path, change: dict[str, object], readable: bool
) -> None:
    async with jobs_running(tmp_path, run=False) as jobs:
        job = await jobs.submit(calls("say 1"))
        path = jobs.store.path(job.id) / "meta.json"
        meta = json.loads(path.read_text())
        assert meta.pop("version") == 1
        path.write_text(json.dumps(meta | change))
        answer, listed = await jobs.ask("GET", f"/{job.id}"), (await jobs.ask("GET", "")).json()["jobs"]
        assert (answer.status_code, len(listed)) == ((200, 1) if readable else (404, 0))
        options = chunks.ChunkOptions(jobs.service.url)
        assert await asyncio.to_thread(chunks.run_chunk, jobs.store, job.id, 1, options, threading.Event()) is readable
    assert readable or "has folder format 2, this process reads up to 1" in answer.json()["detail"]


def test_half_a_job_is_never_seen(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    with store.draft("") as draft:
        draft.add_chunk([b"{}"])
        assert store.ids() == []
    assert store.ids() == [] and list(tmp_path.iterdir()) == []


def test_what_dead_gateways_left_is_swept_and_what_is_being_received_is_not(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    for name in (".new-dead", ".gone-dead", ".new-alive"):
        (tmp_path / name / "chunks").mkdir(parents=True)
    for name in (".new-dead", ".gone-dead", ".new-alive"):
        os.utime(tmp_path / name, (0, 0))
        if name != ".new-alive":
            os.utime(tmp_path / name / "chunks", (0, 0))
    store.sweep()
    assert [path.name for path in tmp_path.iterdir()] == [".new-alive"]


async def test_ended_job_is_removed_when_its_time_is_over(tmp_path: Path) -> None:
    async with jobs_running(tmp_path, jobs_keep_s=0.5) as jobs:
        job = await jobs.submit(calls("say 1"))
        async with asyncio.timeout(30):
            while (await jobs.ask("GET", f"/{job.id}")).status_code != 404:  # noqa: ASYNC110 - the gateway decides
                await asyncio.sleep(0.1)
