"""The load notices every way in which a service breaks its promise."""

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.support.steady_load import Counts, Program, SteadyLoad

Answer = Callable[["Handler", list[dict[str, str]]], None]


class Handler(BaseHTTPRequestHandler):
    """A service with one fault."""

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


def counts_with(habit: Answer) -> Counts:
    with service(habit) as url:
        load = SteadyLoad(lambda: [url], Program.echo, 1, callers=2, batch=5, most=20)
        with load:
            load.join(20)
    return load.counts


def good(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.all_right(calls)
    handler.end()


def good_after_a_keep_alive(handler: Handler, calls: list[dict[str, str]]) -> None:
    handler.wfile.write(b"1\r\n\n\r\n")
    good(handler, calls)


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


@pytest.mark.parametrize("habit", [good, good_after_a_keep_alive])
def test_a_service_that_keeps_its_promise_has_clean_counts(habit: Answer) -> None:
    assert counts_with(habit) == Counts(accepted=20, answered=20, right=20)


@pytest.mark.parametrize(
    ("habit", "column"),
    [(one_too_few, "lost"), (one_twice, "twice"), (one_is_somebody_elses, "wrong"), (one_is_blamed, "model")],
)
def test_a_broken_promise_is_seen(habit: Answer, column: str) -> None:
    counts = counts_with(habit)
    assert getattr(counts, column) == 4 and not counts.holds


def test_what_a_broken_connection_leaves_open_is_sent_again() -> None:
    counts = counts_with(breaks_at_first)
    assert (counts.right, counts.lost) == (20, 0)
    assert counts.broken == counts.sent_again > 0  # how many depends on how many calls were due when a request was sent
    assert counts.holds and counts.accepted == counts.answered + counts.broken


def test_what_failed_by_no_fault_of_its_own_is_sent_again() -> None:
    counts = counts_with(fails_at_first)
    assert (counts.right, counts.infra, counts.sent_again, counts.given_up) == (20, 10, 10, 0) and counts.holds
