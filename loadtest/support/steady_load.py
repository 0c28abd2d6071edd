"""A load that follows every call until it has its one right result, and counts every outcome.

    load = SteadyLoad(lambda: urls, Program.echo, seed=1)
    with load:
        ...
    assert load.counts.lost == 0

It is a client that relies on the promise: each call has an idempotency key, and a call whose connection breaks, or whose result
is blamed on infra and retryable, is sent again with the same key, maybe to another gateway.
"""

import contextlib
import http.client
import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from exec_wire import Result, decode_result

DEADLINE_S = 60.0
GRACE_S = 15.0  # without a byte for so long after the deadline, the calls of a connection are lost
PAUSE_S = 0.2  # after a refusal or a broken connection


class Program(NamedTuple):
    code: str
    stdout: str

    @classmethod
    def echo(cls, name: str) -> Self:
        return cls(name, name)

    @classmethod
    def python(cls, name: str) -> Self:
        """Runs for 10 ms, so that a kill meets running programs."""
        return cls(f"import time; time.sleep(0.01); print({name!r})", f"{name}\n")


class WrongResult(Exception):
    """A result that has another output than its program."""


class Counts(Struct):
    """Numbers of calls. The first three count acceptances: a call that is sent again is accepted again."""

    accepted: int = 0
    answered: int = 0
    broken: int = 0  # accepted, and then the connection broke
    lost: int = 0  # accepted, and the response ended, or stalled, without their results
    twice: int = 0  # a second result on the same connection
    refused: int = 0  # 429, 503
    sent_again: int = 0
    infra: int = 0  # results blamed on infra; most are sent again
    given_up: int = 0  # of these, the ones that are not retryable
    model: int = 0  # results blamed on the program, which is right
    wrong: int = 0  # results with another output
    right: int = 0  # calls with their right result
    notes: dict[str, int] = {}  # what was not right, and how often

    def note(self, words: str) -> None:
        self.notes[words] = self.notes.get(words, 0) + 1

    def add(self, result: Result, stdout: str) -> None:
        """Count a result, which has to be `ok` with this output."""
        self.answered += 1
        if result.blame == "infra":
            self.infra += 1
            self.note(f"{result.status}: {result.error}")
        elif result.status != "ok":
            self.model += 1
            self.note(f"{result.status} blamed on {result.blame}")
        elif result.stdout == stdout:
            self.right += 1
        else:
            self.wrong += 1
            self.note(f"output {result.stdout[:80]!r}")

    @property
    def holds(self) -> bool:
        """Whether the promise holds."""
        return not (self.lost or self.twice or self.model or self.wrong)


class SteadyLoad:
    """`callers` threads with one request of `batch` calls each in flight, until it is stopped or has made `most` calls."""

    def __init__(
        self,
        gateways: Callable[[], Sequence[str]],
        program: Callable[[str], Program],
        seed: int,
        *,
        name: str = "load",
        callers: int = 8,
        batch: int = 50,
        most: int | None = None,
        first_pause_s: float = 0.0,
        read_pause_s: float = 0.0,
        per_s: float | None = None,
    ) -> None:
        """Args:
        first_pause_s: before the response is read; read_pause_s: between two reads.
        per_s: calls per second, whether or not others were answered; by default as fast as they are answered.
        """
        self.counts = Counts(notes={})
        self.latencies_s: list[float] = []  # from when a request was due to its last result
        self.dues: list[float] = []  # when these requests were due, by the monotonic clock
        self._gateways, self._program, self._seed, self._name = gateways, program, seed, name
        self._batch, self._most = batch, most
        self._first_pause_s, self._read_pause_s = first_pause_s, read_pause_s
        self.per_s = per_s  # may change while the load runs
        self._next_due = 0.0
        self._key = uuid.uuid4().hex  # no two loads share a key, so none gets the recorded result of another
        self._failure: BaseException | None = None  # of a thread
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(callers)]

    def __enter__(self) -> Self:
        self._next_due = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join()

    def join(self, patience_s: float | None = None) -> None:
        give_up = time.monotonic() + (3 * (DEADLINE_S + GRACE_S) if patience_s is None else patience_s)
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"the load does not end: {self.counts}")
        if self._failure is not None:
            raise RuntimeError(f"the load failed, and its counts are incomplete: {self.counts}") from self._failure

    # -- one thread -------------------------------------------------------------------------------------------------------

    def _work(self, which: int) -> None:
        try:
            self._call_until_stopped(random.Random(f"{self._seed} {self._name} {which}"))
        except BaseException as error:
            self._failure = error
            self._stop.set()

    def _call_until_stopped(self, chance: random.Random) -> None:
        while not self._stop.is_set() and (names := self._next_names()):
            due = self._wait_until_due()
            if self._stop.is_set():
                return
            open_ = {name: self._program(name) for name in names}
            while open_:
                self._attempt(chance.choice(self._gateways()), open_)
            with self._lock:
                self.latencies_s.append(time.monotonic() - due)
                self.dues.append(due)

    def _wait_until_due(self) -> float:
        if not self.per_s:
            return time.monotonic()
        with self._lock:
            due = self._next_due
            self._next_due += self._batch / self.per_s
        self._stop.wait(max(0.0, due - time.monotonic()))
        return due

    @property
    def behind_s(self) -> float:
        """How late the next request of a paced load is, because every caller waits for an answer."""
        return max(0.0, time.monotonic() - self._next_due)

    def _next_names(self) -> list[str]:
        with self._lock:
            numbers = list(itertools.islice(self._numbers, self._batch))
        return [f"{self._name}-{number}" for number in numbers if self._most is None or number < self._most]

    def _attempt(self, url: str, open_: dict[str, Program]) -> None:
        """One request with the open calls; removes those that are settled."""
        names = list(open_)
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S + GRACE_S)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v1/batch", self._body(open_), {"content-type": "application/json"})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                time.sleep(PAUSE_S)  # not accepted
                return
            if response.status != 200:
                self._refused(response, len(names))
                return
            self._count(accepted=len(names))
            self._read(response, names, open_)

    def _body(self, open_: dict[str, Program]) -> bytes:
        shared = {"deadline_s": DEADLINE_S, "tenant": self._name}
        calls = [{"code": one.code, "idempotency_key": f"{self._key}-{name}"} | shared for name, one in open_.items()]
        return msgspec.json.encode({"calls": calls})

    def _refused(self, response: http.client.HTTPResponse, calls: int) -> None:
        words = response.read()[:300].decode(errors="replace")
        if response.status not in (429, 503):
            raise RuntimeError(f"{response.status}: {words}")
        self._count(refused=calls)
        self._stop.wait(min(2.0, float(response.headers.get("retry-after", PAUSE_S))))

    def _read(self, response: http.client.HTTPResponse, names: list[str], open_: dict[str, Program]) -> None:
        missing = set(range(len(names)))
        time.sleep(self._first_pause_s)
        try:
            for line in self._lines(response):
                landed = decode_result(line)
                if landed.index not in missing:
                    self._count(twice=1)
                    continue
                missing.discard(landed.index)
                self._settle(landed, names[landed.index], open_)
        except TimeoutError:
            self._lose("the response stalled", missing, names, open_)
        except (OSError, http.client.HTTPException):
            self._count(broken=len(missing), sent_again=len(missing))
        else:
            if missing:
                self._lose("the response ended", missing, names, open_)

    def _lines(self, response: http.client.HTTPResponse) -> Iterable[bytes]:
        """Uses `read1`: `readline` takes a broken connection for the end of the response."""
        rest = b""
        while data := response.read1(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            yield from filter(None, lines)  # an empty line keeps the connection alive
            if self._read_pause_s:
                time.sleep(self._read_pause_s)

    def _settle(self, landed: Result, name: str, open_: dict[str, Program]) -> None:
        with self._lock:
            self.counts.add(landed, open_[name].stdout)
        if landed.blame == "infra":
            self._count(sent_again=landed.retryable, given_up=not landed.retryable)
        if landed.blame != "infra" or not landed.retryable:
            del open_[name]

    def _lose(self, why: str, missing: set[int], names: list[str], open_: dict[str, Program]) -> None:
        self._count(lost=len(missing), note=f"lost: {why}")
        for index in missing:
            del open_[names[index]]

    def _count(self, note: str = "", **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)
            if note:
                self.counts.note(note)


def add_up(all_counts: Iterable[Counts]) -> Counts:
    numbers: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for counts in all_counts:
        fields = msgspec.structs.asdict(counts)
        notes.update(fields.pop("notes"))
        numbers.update(fields)
    return Counts(notes=dict(notes), **numbers)


def time_single_calls(url: str, program: Program, **fields: object) -> Generator[float, None, None]:
    """Milliseconds of one call after the other through /v1/run on one connection. Raises WrongResult."""
    body = msgspec.json.encode({"code": program.code, **fields})
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
        while True:
            began = time.perf_counter()
            connection.request("POST", "/v1/run", body, {"content-type": "application/json"})
            answer = msgspec.json.decode(connection.getresponse().read())
            latency_ms = 1000 * (time.perf_counter() - began)
            if answer.get("stdout") != program.stdout:
                raise WrongResult(f"{program.code} was answered with {answer}")
            yield latency_ms
