"""Adds a tenth of the users at a time: `make load SHAPE=ramp`.

This shape is a file of its own because locust uses every shape that it finds in its files.
"""

from locust import LoadTestShape

STAGES = 10


class RampShape(LoadTestShape):
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None and self.runner.environment.parsed_options is not None
        options, elapsed_s = self.runner.environment.parsed_options, self.get_run_time()
        whole_s = float(options.run_time or 60)
        if elapsed_s > whole_s:
            return None
        users = options.num_users or 1
        return max(1, users * (1 + int(STAGES * elapsed_s / whole_s)) // STAGES), float(users)
