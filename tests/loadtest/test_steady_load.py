"""The load that keeps books must see it when a service breaks its promise."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.steady_load import Books, Program, SteadyLoad

Answer = Callable[["Handler", list[dict[str, str]]], None]


class Handler(BaseHTTPRequestHandler):
    """A service with one bad habit."""

    protocol_version = "HTTP/1.1"
    habit: Answer
    numbers: Iterator[int]  # of requests

    def do_POST(self) -> None:
        calls = json.loads(self.rfile.read(int(self.headers["content-length"])))["calls"]
        self.number = next(type(self).numbers)  # others come meanwhile
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        type(self).habit(self, calls)

    def result(self, call: dict[str, str], index: int, **other: object) -> None:
        right = {"status": "ok", "blame": "none", "retryable": False, "index": index, "stdout": call["code"]}
        line = json.dumps(right | other).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def all_right(self, calls: list[dict[str, str]]) -> None:
        for index, call in enumerate(calls):
            self.result(call, index)

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def service(habit: Answer) -> Iterator[str]:
    handler = type("OneHabit", (Handler,), {"habit": habit, "numbers": itertools.count(1)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def books_with(habit: Answer) -> Books:
    with service(habit) as url:
        load = SteadyLoad(lambda: [url], Program.echo, 1, callers=2, batch=5, most=20)
        with load:
            load.join(20)
    return load.books


def good(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls)
    handler.end()


def one_too_few(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls[:-1])
    handler.end()


def one_twice(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls)
    handler.result(calls[0], 0)
    handler.end()


def one_is_somebody_elses(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls[:-1])
    handler.result(calls[0], len(calls) - 1)
    handler.end()


def one_is_blamed(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls[:-1])
    handler.result(calls[-1], len(calls) - 1, status="signal", blame="model")
    handler.end()


def breaks_at_first(handler: Handler, calls: list[dict[str, str]]) -> None:
    if handler.number > 2:
        good(handler, calls)
        return
    handler.all_right(calls[:2])
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def fails_at_first(handler: Handler, calls: list[dict[str, str]]) -> None:
    if handler.number > 2:
        good(handler, calls)
        return
    for index, call in enumerate(calls):
        handler.result(call, index, status="worker_lost", blame="infra", retryable=True)
    handler.end()


def test_a_service_that_keeps_its_promise_has_clean_books() -> None:
    assert books_with(good) == Books(accepted=20, answered=20, right=20)


@pytest.mark.parametrize(
    ("habit", "column"),
    [(one_too_few, "lost"), (one_twice, "twice"), (one_is_somebody_elses, "wrong"), (one_is_blamed, "model")],
)
def test_a_broken_promise_is_seen(habit: Answer, column: str) -> None:
    books = books_with(habit)
    assert getattr(books, column) == 4 and not books.holds


def test_what_a_broken_connection_leaves_open_is_sent_again() -> None:
    books = books_with(breaks_at_first)
    assert (books.right, books.lost) == (20, 0)
    assert books.broken == books.sent_again > 0  # how many depends on how many calls were due when a request was sent
    assert books.holds and books.accepted == books.answered + books.broken


def test_what_failed_by_no_fault_of_its_own_is_sent_again() -> None:
    books = books_with(fails_at_first)
    assert (books.right, books.infra, books.sent_again, books.given_up) == (20, 10, 10, 0) and books.holds
