"""Discrete-event simulation of a cluster: calls pass gateway, queue and worker, and all of these need time on cores.

What is simulated: event loops that take all that waits at once (each gateway, Redis, each worker, the caller), slots that run a
program each, the window of released calls, workers that take a call when a slot is free, leases that lapse when a worker dies.
Cores go to event loops first, which have slept, and are shared evenly among programs; who becomes ready while all are busy
waits for the end of somebody's turn. On a machine that was idle lately everything costs more CPU time: caches are cold and
cores asleep. Not simulated: memory, the network but for a fixed delay, tenants and priorities, refusals (429), a Redis that
fails.

`loadtest.calibrate` measures the costs, `loadtest.plan` asks the questions.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from exec_wire.queue.protocol import LEASE_S

COOLING_S = 0.1  # in which two thirds of a machine's warmth are gone

Then = Callable[[], None]


def turn_s(cores: int) -> float:
    """How long a program goes on, on average, when somebody else becomes ready: half of the turn that Linux gives it."""
    return 0.00035 * (1 + int(math.log2(min(cores, 8))))


def _nothing() -> None:
    """Nobody waits for it."""


class Demand(NamedTuple):
    """What one program needs: CPU time on a busy machine, set-up and cleaning included, and time that it sleeps."""

    cpu_s: float
    pause_s: float = 0.0


class Cost(Struct, frozen=True):
    """CPU time of one thread, on a busy machine. What waits when it wakes up is done together."""

    wake_s: float = 0.0  # once for all that waits
    call_s: float = 0.0  # for each call, half on its way in, half on its way out
    cold: float = 1.0  # times as much on a machine that was idle


class Costs(Struct, frozen=True):
    """Of a call outside of its program."""

    caller: Cost = Cost()
    gateway: Cost = Cost()
    redis: Cost = Cost()
    worker: Cost = Cost()
    hop_s: float = 0.0  # delay on the way in and out that costs nobody CPU time
    program_cold: float = 1.0  # as `Cost.cold`, of programs
    aside: float = 0.0  # share of a program's CPU time that no answer waits for, as when the sandbox is cleaned up


class Shape(Struct, frozen=True):
    """The machines. `together`: everything, the caller too, on one machine with `cores`, as when it is measured here."""

    workers: int = 1
    slots: int = 1  # of each worker
    cores: int = 1  # of each worker's machine
    gateways: int = 1
    together: bool = False
    release_factor: float = 1.25
    turn_s: float = 0.0  # 0: nobody waits for a turn


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def at(self, when: float, then: Then) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), then))

    def run(self) -> None:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class Fair:
    """Work that shares evenly what it is given; in virtual time, which passes alike for all, so an arrival changes no entry."""

    def __init__(self) -> None:
        self._work: list[tuple[float, int, Then]] = []  # a heap by the virtual time of its end
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._work)

    def add(self, number: int, work_s: float, then: Then) -> None:
        heapq.heappush(self._work, (self._virtual + work_s, number, then))

    def advance(self, each_s: float) -> None:
        self._virtual += each_s

    @property
    def next_s(self) -> float:
        """Work until the first one is done."""
        return max(0.0, self._work[0][0] - self._virtual)

    def pop(self) -> Then:
        return heapq.heappop(self._work)[2]


class Cores:
    """Cores of one machine. Event loops come first, programs share what is left."""

    def __init__(self, clock: Clock, count: int, turn_s: float = 0.0) -> None:
        self._clock, self._count, self._turn_s = clock, count, turn_s
        self._loops, self._programs = Fair(), Fair()
        self._line: dict[int, tuple[Fair, float, Then]] = {}  # who waits for its turn
        self._numbers = itertools.count()
        self._since = 0.0
        self._version = 0
        self._warmth = 0.0  # the share of the cores that was busy lately
        self.busy_s = 0.0  # of all cores together

    def _ready(self) -> int:
        return len(self._loops) + len(self._programs)

    def _rates(self) -> tuple[tuple[Fair, float], tuple[Fair, float]]:
        """What each one gets of a core."""
        loops, programs = len(self._loops), len(self._programs)
        left = max(0, self._count - loops)
        return (
            (self._loops, min(1.0, self._count / loops) if loops else 0.0),
            (self._programs, min(1.0, left / programs) if programs else 0.0),
        )

    def add(self, work_s: float, then: Then, cold: float = 1.0, *, program: bool = False) -> None:
        """`cold`: times as much work on a machine that was idle."""
        self._pass_time()
        work_s *= cold + (1 - cold) * self._warmth
        number = next(self._numbers)
        kind = self._programs if program else self._loops
        if not self._turn_s or self._ready() < self._count:
            self._begin(number, kind, work_s, then)
            return
        self._line[number] = (kind, work_s, then)
        turns = len(self._programs) / self._count if program else 1.0
        self._clock.at(self._clock.now + self._turn_s * turns, partial(self._turn_has_come, number))

    def _turn_has_come(self, number: int) -> None:
        if number in self._line:
            self._pass_time()
            self._begin(number, *self._line.pop(number))

    def _begin(self, number: int, kind: Fair, work_s: float, then: Then) -> None:
        kind.add(number, work_s, then)
        self._plan()

    def _pass_time(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        busy = min(self._ready(), self._count)
        self._warmth += (busy / self._count - self._warmth) * -math.expm1(-elapsed / COOLING_S)
        self.busy_s += elapsed * busy
        for kind, rate in self._rates():
            kind.advance(elapsed * rate)

    def _plan(self) -> None:
        """The next end; an earlier plan is void."""
        self._version += 1
        ends = [(kind.next_s / rate, kind) for kind, rate in self._rates() if rate]
        if ends:
            due_s, kind = min(ends, key=lambda end: end[0])
            self._clock.at(self._clock.now + due_s, partial(self._end, self._version, kind))

    def _end(self, version: int, kind: Fair) -> None:
        if version == self._version:
            self._pass_time()
            then = kind.pop()
            self._plan()
            if self._line and self._ready() < self._count:
                self._turn_has_come(min(self._line, key=lambda number: (self._line[number][0] is self._programs, number)))
            then()


class Thread:
    """An event loop: takes all that has come since its last turn, and has done it when its work is done."""

    def __init__(self, cores: Cores, cost: Cost) -> None:
        self._cores, self._wake_s, self._each_s, self._cold = cores, cost.wake_s, cost.call_s / 2, cost.cold
        self._free = not (cost.wake_s or cost.call_s)
        self._line: list[Then] = []
        self._busy = False

    def do(self, then: Then) -> None:
        if self._free:
            then()
            return
        self._line.append(then)
        if not self._busy:
            self._turn()

    def _turn(self) -> None:
        self._busy = True
        taken, self._line = self._line, []
        self._cores.add(self._wake_s + self._each_s * len(taken), partial(self._done, taken), self._cold)

    def _done(self, taken: list[Then]) -> None:
        for then in taken:
            then()
        if self._line:
            self._turn()
        else:
            self._busy = False


class Visit:
    """One call on its way."""

    __slots__ = ("arrived_s", "demand", "ended_s", "gateway", "started_s", "starts", "worker")

    def __init__(self, arrived_s: float, demand: Demand, gateway: Gateway) -> None:
        self.arrived_s, self.demand, self.gateway = arrived_s, demand, gateway
        self.started_s = self.ended_s = math.nan
        self.starts = 0
        self.worker: Worker | None = None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.arrived_s


class Gateway:
    def __init__(self, cores: Cores, cost: Cost) -> None:
        self.thread = Thread(cores, cost)
        self.waiting: deque[Visit] = deque()
        self.released = 0


class Worker:
    def __init__(self, cores: Cores, cost: Cost) -> None:
        self.cores, self.thread = cores, Thread(cores, cost)
        self.running: dict[Visit, None] = {}  # in the order of their starts
        self.alive = True


class Simulation:
    """`offer` calls, then `run`. `visits` are those that were offered, in that order."""

    def __init__(self, shape: Shape, costs: Costs) -> None:
        self.clock, self.visits = Clock(), list[Visit]()
        self._shape, self._costs = shape, costs
        shared = Cores(self.clock, shape.cores, shape.turn_s) if shape.together else None
        machines = [shared or Cores(self.clock, shape.cores, shape.turn_s) for _ in range(shape.workers)]
        self._workers = [Worker(cores, costs.worker) for cores in machines]
        self._gateways = [Gateway(shared or Cores(self.clock, 1), costs.gateway) for _ in range(shape.gateways)]
        self.worker_cores, self.redis_cores = machines, shared or Cores(self.clock, 1)
        self._redis = Thread(self.redis_cores, costs.redis)
        self._caller = Thread(shared or Cores(self.clock, 1), costs.caller)
        self._stream: deque[Visit] = deque()
        # One entry per free slot; the one that has been free longest is next. Dealt in turn, so that the load spreads.
        self._free = deque(worker for _ in range(shape.slots) for worker in self._workers)
        self._window = 0
        self._set_window(shape.workers)
        self.when_done: Callable[[Visit], None] = lambda _: None

    def _set_window(self, workers: int) -> None:
        shape = self._shape
        self._window = math.ceil(shape.release_factor * workers * shape.slots / shape.gateways)

    def offer(self, at_s: float, demand: Demand) -> None:
        visit = Visit(at_s, demand, self._gateways[len(self.visits) % len(self._gateways)])
        self.visits.append(visit)
        self.clock.at(at_s, partial(self._arrive, visit))

    def kill_worker(self, at_s: float) -> None:
        """One machine is gone. Its calls are taken by others when their leases have lapsed; gateways forget it then, too."""
        self.clock.at(at_s, self._kill)

    def run(self) -> None:
        self.clock.run()

    @property
    def took_s(self) -> float:
        return max(visit.ended_s for visit in self.visits) - self.visits[0].arrived_s

    @property
    def pace(self) -> float:
        """Calls a second."""
        return len(self.visits) / self.took_s

    # A call's way, in its order.

    def _arrive(self, visit: Visit) -> None:
        self._caller.do(partial(self._travel, partial(self._enter, visit)))

    def _travel(self, then: Then) -> None:
        if self._costs.hop_s:
            self.clock.at(self.clock.now + self._costs.hop_s / 2, then)
        else:
            then()

    def _enter(self, visit: Visit) -> None:
        visit.gateway.thread.do(partial(self._wait, visit))

    def _wait(self, visit: Visit) -> None:
        visit.gateway.waiting.append(visit)
        self._release(visit.gateway)

    def _release(self, gateway: Gateway) -> None:
        while gateway.waiting and gateway.released < self._window:
            gateway.released += 1
            self._redis.do(partial(self._publish, gateway.waiting.popleft()))

    def _publish(self, visit: Visit) -> None:
        self._stream.append(visit)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._stream and self._free:
            worker = self._free.popleft()
            if worker.alive:
                self._start(self._stream.popleft(), worker)

    def _start(self, visit: Visit, worker: Worker) -> None:
        visit.worker, visit.started_s = worker, self.clock.now
        visit.starts += 1
        worker.running[visit] = None
        worker.thread.do(partial(self._compute, visit, worker))

    def _compute(self, visit: Visit, worker: Worker) -> None:
        before_s = visit.demand.cpu_s * (1 - self._costs.aside)
        worker.cores.add(before_s, partial(self._sleep, visit, worker), self._costs.program_cold, program=True)

    def _sleep(self, visit: Visit, worker: Worker) -> None:
        if self._costs.aside:
            worker.cores.add(visit.demand.cpu_s * self._costs.aside, _nothing, self._costs.program_cold, program=True)
        if visit.demand.pause_s > 0:
            self.clock.at(self.clock.now + visit.demand.pause_s, partial(self._answer, visit, worker))
        else:
            self._answer(visit, worker)

    def _answer(self, visit: Visit, worker: Worker) -> None:
        worker.thread.do(partial(self._return, visit, worker))

    def _return(self, visit: Visit, worker: Worker) -> None:
        if worker.alive:
            self._redis.do(partial(self._free_slot, visit, worker))

    def _free_slot(self, visit: Visit, worker: Worker) -> None:
        if not worker.alive:
            return
        del worker.running[visit]
        self._free.append(worker)
        self._hand_out()
        visit.gateway.thread.do(partial(self._leave, visit))

    def _leave(self, visit: Visit) -> None:
        visit.gateway.released -= 1
        self._release(visit.gateway)
        self._travel(partial(self._caller.do, partial(self._finish, visit)))

    def _finish(self, visit: Visit) -> None:
        visit.ended_s = self.clock.now
        self.when_done(visit)

    def _kill(self) -> None:
        worker = next(worker for worker in self._workers if worker.alive)
        worker.alive = False
        self.clock.at(self.clock.now + LEASE_S, partial(self._take_over, worker))

    def _take_over(self, dead: Worker) -> None:
        self._set_window(sum(worker.alive for worker in self._workers))
        self._stream.extendleft(dead.running)
        dead.running = {}
        self._hand_out()


def open_loop(shape: Shape, costs: Costs, arrivals: Iterable[tuple[float, Demand]], death_s: float | None = None) -> Simulation:
    """Calls that come when they come, whatever became of the others; maybe a machine dies meanwhile."""
    simulation = Simulation(shape, costs)
    for at_s, demand in arrivals:
        simulation.offer(at_s, demand)
    if death_s is not None:
        simulation.kill_worker(death_s)
    simulation.run()
    return simulation


def closed_loop(
    shape: Shape, costs: Costs, demands: Iterable[Demand], in_flight: int, death_s: float | None = None, pause_s: float = 0.0
) -> Simulation:
    """`in_flight` calls at a time: whoever has an answer asks for the next, after a pause."""
    simulation = Simulation(shape, costs)
    rest = iter(demands)

    def next_one(_: Visit | None = None) -> None:
        if (demand := next(rest, None)) is not None:
            simulation.offer(simulation.clock.now + pause_s, demand)

    simulation.when_done = next_one
    for _ in range(in_flight):
        next_one()
    if death_s is not None:
        simulation.kill_worker(death_s)
    simulation.run()
    return simulation
