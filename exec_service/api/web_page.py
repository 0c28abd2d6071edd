"""The web page at `/`: a playground, sessions and a live view. Serves the files of `exec_service/web`; there is no build step.

The page shows the output of programs, which must stay text: the policy allows only scripts of these files, no markup made from
strings (Trusted Types), no images from elsewhere (a program's pictures are drawn on a canvas), and no other server.
"""

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
}


PAGE = "index.html"
PARTS = (
    "style.css icon.svg theme.js main.js service.js dom.js editor.js report.js playground.js sessions.js fork_tree.js "
    "live.js chart.js"
).split()
FILES = {"/": FOLDER / PAGE} | {f"/web/{name}": FOLDER / name for name in PARTS}
PAGE_ROUTES = frozenset(FILES)  # they reveal nothing of the service, so they need no key


def page_routes() -> list[Route]:
    return [Route(route, _serve(file), methods=["GET"], include_in_schema=False) for route, file in FILES.items()]


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = HEADERS | {"content-type": KINDS[file.suffix], "etag": etag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return serve
