"""What a caller does wrong is a 4xx problem with a stable code and the path of the field, never a 500."""

import base64

import httpx
import pytest
from gateway_harness import JSON, Service, problem, raw_request, running


async def post(service: Service, body: bytes, route: str = "/v1/run") -> httpx.Response:
    return await service.client.post(route, content=body, headers=JSON)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"code": "x"} trailing',
        b"\xff\xfe",
        b'{"code": "\xff"}',
        b'{"code": "\\ud800"}',
        b'{"code": "\\udc00 lone"}',
        b'{"code": "x", "deadline_s": NaN}',
        b'{"code": "x", "deadline_s": Infinity}',
        b'{"x": ' + b"[" * 100_000,
        b"\xef\xbb\xbf{}",
    ],
)
async def test_malformed_json_is_400_bad_json(shared: Service, body: bytes) -> None:
    problem(await post(shared, body), 400, "bad_json")
    if body:
        problem(await post(shared, b'{"calls": [' + body + b"]}", "/v1/batch"), 400, "bad_json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"[]", "$"),
        (b"null", "$"),
        (b"{}", "$.code"),
        (b'{"code": 1}', "$.code"),
        (b'{"code": "", "limits": {"wall_s": -1}}', "$.limits.wall_s"),
        (b'{"code": "", "limits": {"wall_s": 1e999}}', "$.limits.wall_s"),
        (b'{"code": "", "limits": {"memory_mb": 1.5}}', "$.limits.memory_mb"),
        (b'{"code": "", "limits": {"memory_mb": ' + b"9" * 400 + b"}}", "$.limits.memory_mb"),
        (b'{"code": "", "tags": {"step": ' + b"9" * 5000 + b"}}", "$.tags.step"),
        (b'{"code": "", "priority": "' + b"x" * 10_000 + b'"}', "$.priority"),
        (b'{"code": "", "id": "' + b"x" * 257 + b'"}', "$.id"),
        (b'{"code": "", "argv": ["a", 3]}', "$.argv[1]"),
        (b'{"code": "", "files": {"a": 3}}', "$.files[...]"),
        (b'{"code": "", "require_tier": "Z"}', "$.require_tier"),
    ],
)
async def test_a_wrong_field_is_422_with_its_path(shared: Service, body: bytes, field: str) -> None:
    problem_body = problem(await post(shared, body), 422, "bad_field")
    assert problem_body["field"] == field
    assert 0 < len(str(problem_body["detail"])) < 400


async def test_the_path_of_a_field_in_a_batch_names_the_call(shared: Service) -> None:
    body = b'{"calls": [{"code": ""}, {"code": ""}, {"code": ""}, {"code": "", "limits": {"wall_s": 0}}]}'
    assert problem(await post(shared, body, "/v1/batch"), 422, "bad_field")["field"] == "$.calls[3].limits.wall_s"
    body = b'{"calls": [{"code": ""}, {}]}'
    assert problem(await post(shared, body, "/v1/batch"), 422, "bad_field")["field"] == "$.calls[1].code"


async def test_a_bad_call_in_a_batch_means_that_none_is_run(service: Service) -> None:
    problem(await service.batch({"code": "say 1"}, {"code": "", "language": "cobol"}), 422, "unknown_language")
    assert (await service.run("say 2")).status_code == 200
    assert service.worker.codes == ["say 2"]


async def test_an_unknown_language_is_422_and_lists_what_is_there(shared: Service) -> None:
    body = problem(await shared.run(language="cobol"), 422, "unknown_language")
    assert body["field"] == "$.language"
    assert "python" in str(body["detail"])


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "/",
        "/tmp",
        "/tmp/",
        "/tmp/../etc/x",
        "//tmp/x",
        "a\0b",
        "dir/",
        "n" * 256,
        "p/" * 600 + "x",
    ],
)
async def test_a_path_outside_is_422_naming_it(shared: Service, path: str) -> None:
    body = problem(await shared.run(files={path: ""}), 422, "bad_field")
    assert str(body["field"]).startswith("$.files['")
    body = problem(await shared.batch({"code": ""}, {"code": "", "fetch_files": ["fine", path]}), 422, "bad_field")
    assert body["field"] == "$.calls[1].fetch_files[1]"


async def test_the_field_of_a_bad_file_carries_its_path(shared: Service) -> None:
    assert problem(await shared.run(files={"a/../b": ""}), 422, "bad_field")["field"] == "$.files['a/../b']"
    body = problem(await shared.batch({"code": "", "files": {"ok": "!"}}), 422, "bad_field")
    assert body["field"] == "$.calls[0].files['ok']"


@pytest.mark.parametrize("path", ["a", "a/b.txt", "./a", "/tmp/x", "/mnt/data/x", "..hidden", "é", "a b"])
async def test_a_path_inside_is_accepted(shared: Service, path: str) -> None:
    response = await shared.run(files={path: base64.b64encode(b"\0data").decode()}, fetch_files=[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("content", ["!", "YQ", "YQ=", "Y Q==", "YQ==YQ==", "é", "YQ==\n"])
async def test_content_that_is_not_base64_is_422(shared: Service, content: str) -> None:
    assert problem(await shared.run(files={"f": content}), 422, "bad_field")["field"] == "$.files['f']"


async def test_files_that_exclude_each_other_are_422(shared: Service) -> None:
    problem(await shared.run(files={"a": "", "./a": ""}), 422, "bad_field")
    assert problem(await shared.run(files={"a/b": "", "a": ""}), 422, "bad_field")["field"] == "$.files['a/b']"


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0")])
async def test_an_impossible_variable_is_422(shared: Service, name: str, value: str) -> None:
    assert str(problem(await shared.run(env={name: value}), 422, "bad_field")["field"]).startswith("$.env['")


async def test_an_argument_with_nul_is_422(shared: Service) -> None:
    assert problem(await shared.run(argv=["fine", "a\0"]), 422, "bad_field")["field"] == "$.argv[1]"


async def test_odd_programs_are_run(service: Service) -> None:
    for code in ("", "\0", "say \0 \x7f \u2028 😀", "say " + "x" * 1_000_000):
        response = await service.run(code, stdin="\0", tags={"step": 10**30}, env={"A": "="})
        assert (response.status_code, response.json()["status"]) == (200, "ok")
    assert service.worker.codes[1] == "\0"


async def test_json_that_repeats_a_name_or_label_is_no_error(shared: Service) -> None:
    assert (await post(shared, b'{"code": "say a", "code": "say b"}')).json()["stdout"] == "b"
    assert (await shared.batch({"code": "", "id": "x"}, {"code": "", "id": "x"})).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonp",
        "multipart/form-data; a=application/json",
    ],
)
async def test_another_content_type_is_415(service: Service, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for route in ("/v1/run", "/v1/batch"):
        response = await service.client.post(route, content=b'{"code": ""}', headers=headers)
        problem(response, 415, "wrong_content_type")
    assert service.worker.codes == []


async def test_a_charset_after_the_content_type_is_fine(shared: Service) -> None:
    response = await shared.client.post(
        "/v1/run", content=b'{"code": ""}', headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert response.status_code == 200


async def test_a_compressed_body_is_415(shared: Service) -> None:
    response = await shared.client.post("/v1/run", content=b"x", headers=JSON | {"content-encoding": "gzip"})
    problem(response, 415, "wrong_content_type")


async def test_batch_over_the_limit_is_413_with_the_number(shared: Service) -> None:
    body = problem(await shared.batch(*({"code": ""} for _ in range(4097))), 413, "too_many_calls")
    assert "4097" in str(body["detail"]) and "4096" in str(body["detail"])
    assert body["field"] == "$.calls"


async def test_an_announced_body_over_the_limit_is_413_before_it_is_read() -> None:
    async with running(max_body_bytes=1000) as service:
        head = b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n"
        answer = await raw_request(service.port, head)  # not one byte of the body is sent
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'"code":"body_too_large"' in answer and b"1000" in answer


async def test_a_chunked_body_over_the_limit_is_413_before_its_end() -> None:
    async with running(max_body_bytes=1000) as service:
        head = b"POST /v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
        answer = await raw_request(service.port, head + b"3ea\r\n" + b" " * 1002 + b"\r\n")  # and never the last chunk
        assert answer.startswith(b"HTTP/1.1 413")


async def test_a_body_at_the_limit_is_accepted() -> None:
    async with running(max_body_bytes=1000) as service:
        body = b'{"code": "say ' + b"x" * (1000 - 16) + b'"}'
        assert len(body) == 1000
        assert (await post(service, body)).status_code == 200


async def test_an_unknown_route_is_404_and_a_wrong_method_405(shared: Service) -> None:
    problem(await shared.client.get("/nothing"), 404, "not_found")
    problem(await shared.client.post("/v1/run/", json={"code": ""}), 404, "not_found")
    response = await shared.client.get("/v1/run")
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    problem(await shared.client.delete("/healthz"), 405, "method_not_allowed")


@pytest.mark.parametrize("text", ["maybe", "", "2"])
async def test_a_bad_query_is_422(shared: Service, text: str) -> None:
    assert problem(await shared.batch(stream=text), 422, "bad_query")["field"] == "stream"


async def test_a_fault_of_ours_is_500_without_details(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.gateway.dispatch, "accept", broken)
    response = await service.run()
    problem(response, 500, "internal")
    assert "secret" not in response.text
    assert (await service.client.get("/healthz")).status_code == 200
