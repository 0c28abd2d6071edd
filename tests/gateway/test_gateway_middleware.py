"""A web site in the user's browser must not be able to run code; an address that others can reach is not served."""

import asyncio
import socket

import httpx
import pytest
from gateway_harness import JSON, Service, problem, raw_request, running

from exec_service.api.listening import BindRefused, PortTaken, bind, check_bind
from exec_service.app import Gateway, serve
from exec_service.config import GatewayConfig
from exec_wire.queue.memory import MemoryQueue


async def post(service: Service, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await service.client.post("/v1/run", content=b'{"code": "say x"}', headers=JSON | named)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.1.2.3:1", "[::1]", "[::1]:99", "exec.localhost:8080", "localhost."],
)
async def test_a_loopback_host_is_served(shared: Service, host: str) -> None:
    assert (await post(shared, host=host)).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0.0.0.0", "[::]", "",
     "evil.example@localhost", "localhost@evil.example", "localhost/x", "localhost:x", "notlocalhost", "[::1", "2130706433"],
)  # fmt: skip
async def test_a_foreign_host_is_403(shared: Service, host: str) -> None:
    before = len(shared.worker.calls)
    problem(await post(shared, host=host), 403, "foreign_host")
    problem(await shared.client.get("/v1/info", headers={"host": host}), 403, "foreign_host")
    assert len(shared.worker.calls) == before


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
async def test_none_or_two_hosts_are_403(shared: Service, hosts: bytes) -> None:
    answer = await raw_request(shared.port, b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 403") and b"foreign_host" in answer


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
async def test_our_own_origin_is_served(shared: Service, name: str) -> None:
    assert (await post(shared, origin=f"http://{name}:{shared.port}")).status_code == 200
    assert (await post(shared, origin=f"http://{name}:{shared.port}", host=f"localhost:{shared.port}")).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://evil.example:{port}", "null", "", "http://localhost:1", "http://localhost", "https://localhost:{port}",
     "http://localhost.evil.example:{port}", "http://evil.example@localhost:{port}", "file://", "localhost:{port}", "chrome-extension://abc"],
)  # fmt: skip
async def test_a_foreign_origin_is_403(shared: Service, origin: str) -> None:
    before = len(shared.worker.calls)
    problem(await post(shared, origin=origin.format(port=shared.port)), 403, "foreign_origin")
    assert len(shared.worker.calls) == before


async def test_a_cross_site_request_is_403(shared: Service) -> None:
    problem(await post(shared, sec_fetch_site="cross-site"), 403, "foreign_origin")
    response = await shared.client.get("/v1/info", headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"})
    problem(response, 403, "foreign_origin")
    for site in ("same-origin", "none"):
        assert (await post(shared, sec_fetch_site=site)).status_code == 200


async def test_a_link_to_our_pages_may_be_followed_but_not_posted_to(shared: Service) -> None:
    visit = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert (await shared.client.get("/docs", headers=visit)).status_code == 200
    problem(await shared.client.post("/v1/run", json={"code": ""}, headers=visit), 403, "foreign_origin")
    problem(await shared.client.get("/docs", headers=visit | {"sec-fetch-dest": "iframe"}), 403, "foreign_origin")


async def test_a_preflight_is_refused_and_nothing_has_cors_headers(shared: Service) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    refused = await shared.client.options("/v1/run", headers=asked)
    served = await post(shared, origin=f"http://localhost:{shared.port}")
    problem(refused, 403, "foreign_origin")
    for response in (refused, served):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_may_be_bound(host: str) -> None:
    check_bind(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "*"])
def test_other_addresses_are_refused_with_words(host: str) -> None:
    with pytest.raises(BindRefused, match=r"refusing to listen.*keys.*127\.0\.0\.1"):
        check_bind(host)


async def test_serving_on_another_address_is_refused_before_anything_listens() -> None:
    async with Gateway(GatewayConfig(host="0.0.0.0", port=0), MemoryQueue().gateway("g")) as gateway:
        with pytest.raises(BindRefused):
            await serve(gateway, stop=asyncio.Event())


def test_a_name_that_leads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    with pytest.raises(BindRefused, match=r"192\.0\.2\.1"):
        bind("localhost", 80)


async def test_a_taken_port_is_an_error_with_words() -> None:
    async with running() as service:
        with pytest.raises(PortTaken, match=rf"127\.0\.0\.1:{service.port}"):
            bind("127.0.0.1", service.port)
