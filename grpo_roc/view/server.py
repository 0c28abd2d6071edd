"""Serves the viewer's page and the JSON that it asks for, on 127.0.0.1 only.

The page shows texts that a model wrote. They must stay text: the policy allows only the scripts of `page/`, no markup made from
strings (Trusted Types), and no other server. A request with another Host is refused, so that a web page elsewhere cannot read
the run through a name that it points to this machine (DNS rebinding).
"""

from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from grpo_roc import rollout_log
from grpo_roc.view.run import Filter, Run

HOST = "127.0.0.1"
PAGE = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Place(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    group: int
    sample: int


def routes(run: Run) -> Mapping[str, Callable[[dict[str, str]], Any]]:
    return {
        "/api/run": lambda _: run.overview(),
        "/api/curves": lambda _: run.curves(),
        "/api/rollouts": lambda query: run.rollouts(msgspec.convert(query, Filter, strict=False)),
        "/api/rollout": lambda query: run.rollout(**msgspec.structs.asdict(msgspec.convert(query, Place, strict=False))),
    }


class Viewer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, run: Run, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.routes = routes(run)
        self.files = {f"/page/{file.name}": file for file in PAGE.iterdir() if file.suffix in KINDS} | {
            "/": PAGE / "index.html"
        }
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # of a connection without requests

    def do_GET(self) -> None:
        if self.headers.get("host", "") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, {"error": f"open this page as {self.server.url}"})
            return
        address = urlsplit(self.path)
        if file := self.server.files.get(address.path):
            self._send(HTTPStatus.OK, file.read_bytes(), f"{KINDS[file.suffix]}; charset=utf-8")
        elif answer := self.server.routes.get(address.path):
            self._answer(*_ask(answer, dict(parse_qsl(address.query))))
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there is no such page"})

    def _answer(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, msgspec.json.encode(value), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"content-type": kind, "content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """The terminal shows the address, and no line per request."""

    def version_string(self) -> str:
        return "grpo_roc"


def _ask(answer: Callable[[dict[str, str]], Any], query: dict[str, str]) -> tuple[HTTPStatus, Any]:
    try:
        return HTTPStatus.OK, answer(query)
    except msgspec.ValidationError as error:
        return HTTPStatus.BAD_REQUEST, {"error": str(error)}
    except LookupError:
        return HTTPStatus.NOT_FOUND, {"error": "this rollout is not recorded, or no longer"}


def make_viewer(folder: Path, port: int) -> Viewer:
    """Raises FileNotFoundError if the folder has no run, and ValueError if the port is taken."""
    if not _is_run(folder):
        inside = sorted({path.parent for path in folder.glob("*/metrics.jsonl")}) if folder.is_dir() else []
        hint = f"; these have one: {', '.join(map(str, inside))}" if inside else ""
        raise FileNotFoundError(f"{folder} has no run: no metrics.jsonl and no rollouts{hint}")
    try:
        return Viewer(Run(folder), port)
    except OSError as error:
        raise ValueError(f"port {port}: {error.strerror}; choose another with --port, or 0 for a free one") from error


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / rollout_log.FOLDER).is_dir()


def serve(folder: Path, port: int) -> None:
    """Until Ctrl+C."""
    viewer = make_viewer(folder, port)
    print(f"{folder}: open {viewer.url} (Ctrl+C ends)", flush=True)
    try:
        viewer.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        viewer.server_close()
