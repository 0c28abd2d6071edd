"""The web page at `/`: a playground, sessions and a live view. Serves the files of `exec_service/web` as they are.

One of them is built: the editor with syntax colours, by `deploy/editor.sh`. Where it was not, a plain editor has its place.

The page shows the output of programs, which must stay text: the policy allows only scripts of these files, no markup made from
strings (Trusted Types), no images from elsewhere (a program's pictures are drawn on a canvas), and no other server.
"""

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parents[1] / "web"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time, and answered 304
    "vary": "accept-encoding",
}


PAGE = "index.html"
PARTS = (
    "style.css icon.svg theme.js main.js service.js store.js dom.js report.js playground.js call_form.js examples.js "
    "snippets.js result_view.js plain_editor.js sessions.js fork_tree.js live.js chart.js docs.js"
).split()
BUILT_EDITOR, PLAIN_EDITOR = FOLDER / "built" / "editor.js", FOLDER / "plain_editor.js"


def editor() -> Path:
    return BUILT_EDITOR if BUILT_EDITOR.is_file() else PLAIN_EDITOR


FILES = {"/": FOLDER / PAGE, "/web/editor.js": editor()} | {f"/web/{name}": FOLDER / name for name in PARTS}
PAGE_ROUTES = frozenset(FILES)  # they reveal nothing of the service, so they need no key


def page_routes() -> list[Route]:
    return [Route(route, _serve(file), methods=["GET"], include_in_schema=False) for route, file in FILES.items()]


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    packed = gzip.compress(content, 6)
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:16]}"'  # weak: the same for both encodings
    headers = HEADERS | {"content-type": KINDS[file.suffix], "etag": etag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(packed, headers=headers | {"content-encoding": "gzip"})
        return Response(content, headers=headers)

    return serve
