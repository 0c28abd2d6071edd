"""Many calls while something is lost, and what became of each."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exec_client import Client

CALLS = 10_000
IN_FLIGHT = 200


def service_of(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def run_while(client: Client, calls: int, lose: Callable[[], None]) -> list[str]:
    """Run `calls` programs and `lose` after a third of them; what did not end in its one right output."""
    answers: list[list[str]] = [[] for _ in range(calls)]
    third = threading.Event()

    def run(number: int) -> None:
        result = client.run(f"print({number} * 7)", deadline_s=300)
        answers[number].append(result.stdout if result.completed else f"{result.status} {result.error}")
        if number >= calls // 3:
            third.set()

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        running = [pool.submit(run, number) for number in range(calls)]
        assert third.wait(600), "the load does not get on"
        lose()
        for future in running:
            future.result()
    return [f"{number}: {got}" for number, got in enumerate(answers) if got != [f"{number * 7}\n"]]
