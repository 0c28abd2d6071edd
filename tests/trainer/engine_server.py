"""A server made of a fixture: returns its replies and refuses every request with an unknown or a missing field.

It keeps the label of its weights (`$LABEL` in replies), and can be told to fail or to hang.
"""

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FIXTURES = Path(__file__).parent / "fixtures"
SGLANG = "sglang-0.5.23"


def problems(route: dict[str, Any], query: dict[str, Any], body: dict[str, Any]) -> list[str]:
    known = [*route.get("required", []), *route.get("optional", [])]
    found = [f"missing field {name}" for name in route.get("required", []) if name not in body]
    found += [f"unknown field {name}" for name in body if name not in known]
    found += [f"unknown query {name}" for name in query if name not in route.get("query", [])]
    for name, fields in route.get("inside", {}).items():
        found += [f"unknown field {name}.{one}" for one in body.get(name, {}) if one not in fields]
    return found


def order(path: str, body: dict[str, Any]) -> str:
    return " ".join([path, *body.get("tags", [])])


class FixtureServer(ThreadingHTTPServer):
    def __init__(self, name: str, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.routes: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())["routes"]
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.label = "default"  # of the weights; a restarted server has the default
        self.failing: Counter[str] = Counter()  # so many of the next requests to a path (and its tags) are answered with 500
        self.answering = threading.Event()  # cleared: it accepts connections and says nothing
        self.answering.set()
        self.dead = False  # its connections, too

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that left while it hung."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FixtureServer

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else {}
        name = f"{method} {url.path}"
        self.server.seen.append((name, body))
        route = self.server.routes.get(name)
        if route is None:
            return self._send(404, "no such route")
        self.server.answering.wait()
        if self.server.dead:
            self.close_connection = True
            return None
        if self.server.failing[asked := order(url.path, body)]:
            self.server.failing[asked] -= 1
            return self._send(500, "out of memory")
        if found := problems(route, parse_qs(url.query), body):
            return self._send(422, "; ".join(found))
        self.server.label = body.get("weight_version", self.server.label)
        text = route["text"] if "text" in route else json.dumps(route["answer"])
        self._send(200, text.replace("$LABEL", self.server.label))

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving_fixture(name: str, port: int = 0) -> Iterator[FixtureServer]:
    server = FixtureServer(name, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.dead = True
        server.answering.set()
        server.shutdown()
        server.server_close()
        thread.join()
