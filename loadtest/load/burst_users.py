"""Users for locust: many calls of one tenant at once, while another tenant makes single calls: `make load SHAPE=burst`.

All users but one send a batch at the same moment: 30 users of 1,500 calls (`-- --calls`) have 45,000 in flight. The run ends
when each of these calls has its result. The row `second` of the statistics is the other tenant.
"""

import time
from typing import Any

import gevent
from locust import constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner, WorkerRunner

from loadtest.load import locustfile

DEADLINE_S = 900.0
TOGETHER_S = 5.0  # all send when the clock shows a multiple of it


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.set_defaults(calls=1500)


class Progress:
    """Ends the run when all users of the burst have ended."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._ended = environment, 0
        if isinstance(environment.runner, MasterRunner):
            environment.runner.register_message("burst user ended", lambda *_, **__: self.one_ended())

    def one_ended(self) -> None:
        runner, options = self._environment.runner, self._environment.parsed_options
        assert runner is not None and options is not None
        if isinstance(runner, WorkerRunner):
            runner.send_message("burst user ended")
            return
        self._ended += 1
        if self._ended == options.num_users - 1:
            gevent.spawn_later(2 * WORKER_REPORT_INTERVAL, runner.quit)  # when all have reported their last results


progress: Progress


@events.init.add_listener
def on_init(environment: Environment, **_: Any) -> None:
    global progress
    progress = Progress(environment)


class BurstUser(locustfile.ClientUser):
    def wait_time(self) -> float:
        return 0.0

    @task
    def burst(self) -> None:
        programs = self.next_programs()
        time.sleep(TOGETHER_S - time.time() % TOGETHER_S)
        calls = locustfile.as_calls(programs, DEADLINE_S, "first")
        for index, latency_s, outcome in self.bridge.do(locustfile.collect(self.client, calls)):
            self.log("burst", programs[index], latency_s, outcome)
        progress.one_ended()
        raise StopUser


class SecondTenantUser(locustfile.ClientUser):
    """One call after the other."""

    fixed_count = 1
    wait_time = constant(0.02)

    @task
    def run_program(self) -> None:
        calls = locustfile.as_calls(self.next_programs()[:1], DEADLINE_S, "second")
        self.timed("second", "single calls", self.client.run(calls[0]), lambda result: result.blame != "infra")
