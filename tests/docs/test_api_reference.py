"""The API reference: every route is in it, every example works, the page sends it, and a published generator makes a client."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import Service, serving
from web_harness import PATIENCE_MS, browsing

from exec_service.api.reference import CALLS, ENTRIES, SESSIONS

NOT_GENERATED = "POST /v1/jobs"  # its body is lines of JSON, which the generator does not know


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving("--jobs-dir", str(tmp_path_factory.mktemp("jobs"))) as service:
        yield service


@pytest.fixture(scope="module")
def document(service: Service) -> dict[str, Any]:
    return dict(service.http.get("/openapi.json").json())


def test_every_route_is_in_the_document_and_calls_come_before_sessions(document: dict[str, Any]) -> None:
    routes = [f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs]
    assert set(routes) == set(ENTRIES)
    assert [tag["name"] for tag in document["tags"]][:3:2] == [CALLS, SESSIONS]
    for verbs in document["paths"].values():
        for operation in verbs.values():
            assert operation["summary"] and operation["operationId"]
            assert all(
                content.get("example") is not None for content in operation.get("requestBody", {}).get("content", {}).values()
            )


def test_every_example_gets_the_answer_that_the_document_promises(service: Service, document: dict[str, Any]) -> None:
    last = [route for route in ENTRIES if route.startswith("DELETE")]  # what the others use
    ids = {"id": "", "job": ""}
    for route in [*(route for route in ENTRIES if route not in last), *last]:
        verb, path = route.split()
        operation, entry = document["paths"][path][verb.lower()], ENTRIES[route]
        body = entry.example if isinstance(entry.example, str) else json.dumps(entry.example)
        kinds = list(operation.get("requestBody", {}).get("content", {"": None}))
        headers = entry.headers | ({"content-type": kinds[0]} if kinds[0] else {})
        if route == "POST /execute":
            headers |= {"x-session-id": ids["id"]}
            body = json.dumps(entry.example | {"language": "ipython"})
        answer = service.http.request(
            verb, path.format(**ids), params=entry.values, content=body if kinds[0] else None, headers=headers
        )
        ended = route.startswith("POST /v1/jobs/{job}/") and answer.status_code == 409  # so short a job may have ended before
        assert str(answer.status_code) in operation["responses"] and (answer.status_code < 300 or ended), (route, answer.text)
        if route == "POST /v1/sessions":
            ids["id"] = answer.json()["id"]
        elif route == "POST /v1/jobs":
            ids["job"] = answer.json()["id"]


def test_page_has_a_form_of_every_route_and_sends_it(service: Service) -> None:
    with browsing() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(service.url) else problems.append(asked.url))
        page.goto(f"{service.url}/docs")
        forms = page.locator("form")
        sent = [
            f"{forms.nth(n).get_attribute('data-verb')} {forms.nth(n).get_attribute('data-path')}" for n in range(forms.count())
        ]
        assert sorted(sent) == sorted(ENTRIES) and sent[0] == "POST /v1/run"
        form = page.locator('form[data-path="/v1/run"]')
        page.locator("details", has=form).locator("summary").click()
        assert "curl -s -X POST" in form.locator(".curl").inner_text()
        form.locator("button").click()
        form.locator(".answer", has_text='"stdout": "42\\n"').wait_for()
        form.locator("textarea").fill('{"code": 1}')
        form.locator("button").click()
        form.locator(".answer", has_text="HTTP 422").wait_for()
        assert '"code": "bad_field"' in form.locator(".answer").inner_text()
        assert problems == []


def test_generated_client_runs_a_program_and_shows_a_refusal(
    service: Service, document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    made = subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--path", str(tmp_path / "openapi.json")),
            *("--output-path", str(tmp_path / "made_client"), "--meta", "none"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": str(Path(sys.executable).parent)},
    )
    assert made.returncode == 0, made.stderr
    words = made.stdout + made.stderr
    assert [line for line in words.splitlines() if line.startswith("WARNING")] == [
        f"WARNING parsing {NOT_GENERATED} within bulk_jobs. Endpoint will not be generated."
    ], words
    monkeypatch.syspath_prepend(str(tmp_path))
    client = importlib.import_module("made_client").Client(base_url=service.url, raise_on_unexpected_status=True)
    models, run = importlib.import_module("made_client.models"), importlib.import_module("made_client.api.calls.run")
    result = run.sync(client=client, body=models.Call(code="print(6 * 7)"))
    assert isinstance(result, models.Result) and (result.status, result.blame, result.stdout) == ("ok", "none", "42\n")
    refused = run.sync_detailed(client=client, body=models.Call(code="", language="cobol"))
    assert refused.status_code == 422 and isinstance(refused.parsed, models.Problem) and refused.parsed.field == "$.language"
