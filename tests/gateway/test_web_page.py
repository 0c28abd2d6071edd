"""The page at `/` as it is sent: complete, from here alone, under a policy that lets output be text only."""

import re

import pytest
from gateway_harness import Service, raw_request

from exec_service.api import web_page
from exec_service.api.web_page import FILES, FOLDER

PARTS = sorted({*FILES.values()})
CODE = [file for file in PARTS if file.suffix == ".js"]


async def test_the_page_and_all_its_parts_are_served(shared: Service) -> None:
    for route, file in FILES.items():
        answer = await shared.client.get(route)
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), route
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_every_file_of_the_page_is_served() -> None:
    assert {file for file in FOLDER.iterdir() if file.is_file()} == {file for file in FILES.values() if file.parent == FOLDER}


def test_without_the_built_editor_the_plain_one_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FILES["/web/editor.js"] == web_page.editor()
    monkeypatch.setattr(web_page, "BUILT_EDITOR", FOLDER / "built" / "missing.js")
    assert web_page.editor() == web_page.PLAIN_EDITOR
    exports = re.compile(r"^export function (\w+)\((.*?)\)", re.M)
    plain, built = (exports.findall(file.read_text()) for file in (web_page.PLAIN_EDITOR, FOLDER / "editor" / "codemirror.js"))
    assert plain == built


async def test_the_policy_allows_our_own_files_and_nothing_else(shared: Service) -> None:
    policy = (await shared.client.get("/")).headers["content-security-policy"]
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["require-trusted-types-for"] == "'script'"
    assert directives["frame-ancestors"] == "'none'"


@pytest.mark.parametrize("file", PARTS, ids=lambda file: file.name)
def test_nothing_is_fetched_from_elsewhere(file) -> None:  # type: ignore[no-untyped-def]
    urls = set(re.findall(r"https?://[^\s\"']+", file.read_text()))
    assert urls <= {"http://www.w3.org/2000/svg"}  # a name, not an address


@pytest.mark.parametrize("file", CODE, ids=lambda file: file.name)
def test_no_script_makes_markup_from_strings(file) -> None:  # type: ignore[no-untyped-def]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", file.read_text())


async def test_what_has_not_changed_is_not_sent_again(shared: Service) -> None:
    etag = (await shared.client.get("/web/main.js")).headers["etag"]
    answer = await shared.client.get("/web/main.js", headers={"if-none-match": etag})
    assert (answer.status_code, answer.content) == (304, b"")


async def test_files_are_sent_compressed_to_those_who_can_read_that(shared: Service) -> None:
    packed = await shared.client.get("/web/editor.js", headers={"accept-encoding": "gzip, br"})
    plain = await shared.client.get("/web/editor.js", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content and int(packed.headers["content-length"]) < int(plain.headers["content-length"])


async def test_no_other_file_can_be_asked_for(shared: Service) -> None:
    for path in (b"/web/../config.py", b"/web/%2e%2e/config.py", b"/web/", b"/web/index.html"):
        answer = await raw_request(shared.port, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404"), path


async def test_a_link_from_another_site_may_lead_to_the_page(shared: Service) -> None:
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert (await shared.client.get("/", headers=visit)).status_code == 200
    assert (await shared.client.get("/v1/stats", headers={"sec-fetch-site": "cross-site"})).status_code == 403
