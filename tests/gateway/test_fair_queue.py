"""The order in which waiting calls are released."""

from collections import Counter

from exec_service.dispatch import fair_queue as waiting
from exec_service.dispatch.fair_queue import Credit, FairQueue
from exec_service.dispatch.tickets import PendingJob


def credit(most: int, **of_class: int) -> Credit:
    """`most` jobs, of the named classes as many as given."""
    return Credit(most, {"python": 10**9, "cpp": 10**9} | of_class)


def flights(count: int, tenant: str = "", priority: str = "train", needs: str = "python") -> list[PendingJob]:
    return [PendingJob(f"{tenant}{number}", b"", needs, None, priority, tenant) for number in range(count)]


def line_of(*groups: list[PendingJob], weights: dict[str, float] | None = None) -> FairQueue:
    line = FairQueue(lambda tenant: (weights or {}).get(tenant, 1.0))
    for group in groups:
        for flight in group:
            line.put(flight)
    return line


def take(line: FairQueue, of_all: Credit, of_bulk: Credit | None = None) -> list[PendingJob]:
    return list(iter(lambda: line.take(of_all, of_bulk), None))


def test_one_tenants_calls_leave_as_they_came() -> None:
    calls = flights(50)
    line = line_of(calls)
    assert take(line, credit(20)) + take(line, credit(100)) == calls
    assert len(line) == 0 and take(line, credit(1)) == []


def test_priorities_share_by_weight_and_none_starves() -> None:
    line = line_of(*(flights(2000, priority=name) for name in ("bulk", "eval", "train")))
    taken = Counter(flight.priority for flight in take(line, credit(2100)))
    assert taken == {"train": 1600, "eval": 400, "bulk": 100}


def test_tenants_share_by_weight() -> None:
    line = line_of(flights(3000, "a"), flights(3000, "b"), flights(3000, "c"), weights={"b": 2, "c": 3})
    taken = Counter(flight.tenant for flight in take(line, credit(600)))
    assert {tenant: round(count, -1) for tenant, count in taken.items()} == {"a": 100, "b": 200, "c": 300}


def test_a_call_of_another_tenant_passes_a_long_line() -> None:
    line = line_of(flights(45_000, "a"))
    take(line, credit(100))
    [single] = flights(1, "b")
    line.put(single)
    assert single in take(line, credit(2))


def test_who_had_nothing_waiting_has_saved_no_turns() -> None:
    line = line_of(flights(1000, "a"))
    take(line, credit(500))
    for flight in flights(500, "b"):
        line.put(flight)
    assert Counter(flight.tenant for flight in take(line, credit(100))) == {"a": 50, "b": 50}


def test_who_sends_call_after_call_gets_no_more_than_its_share() -> None:
    line = line_of(flights(1000, "a"))
    order = ""
    for _ in range(100):
        for flight in flights(1, "b"):
            line.put(flight)
        order += "".join(flight.tenant for flight in take(line, credit(2)))
    assert Counter(order) == {"a": 100, "b": 100}


def test_an_idle_priority_has_saved_no_turns() -> None:
    line = line_of(flights(1000, priority="train"))
    take(line, credit(800))
    for flight in flights(1000, priority="bulk"):
        line.put(flight)
    assert Counter(flight.priority for flight in take(line, credit(34)))["bulk"] in (2, 3)


def test_a_class_without_room_is_passed_over_and_keeps_its_place() -> None:
    cpp, python = flights(10, needs="cpp"), flights(10)
    line = line_of(cpp, python)
    assert take(line, credit(5, cpp=0)) == python[:5]
    assert take(line, credit(4, cpp=1)) == [cpp[0], *python[5:8]]
    assert take(line, credit(99)) == cpp[1:] + python[8:]


def test_a_tenant_whose_class_has_no_room_does_not_hold_up_others() -> None:
    line = line_of(flights(10, "a", needs="cpp"), flights(10, "b"))
    assert {flight.tenant for flight in take(line, credit(10, cpp=0))} == {"b"}
    assert len(line) == 10


def test_bulk_takes_no_more_than_its_own_places_and_the_rest_is_for_others() -> None:
    line = line_of(flights(10, priority="bulk"), flights(2, priority="bulk", needs="cpp"), flights(3, priority="eval"))
    taken = take(line, credit(9), credit(4, cpp=1, python=9))
    assert Counter((flight.priority, flight.needs) for flight in taken) == {("bulk", "python"): 4, ("eval", "python"): 3}
    taken = take(line, credit(9), credit(8, cpp=1, python=9))
    assert Counter(flight.needs for flight in taken) == {"python": 6, "cpp": 1}


def test_what_is_put_back_is_first_again() -> None:
    calls = flights(6)
    line = line_of(calls)
    taken = take(line, credit(3))
    line.put_back(taken)
    assert len(line) == 6 and take(line, credit(6)) == calls


def test_what_was_removed_is_not_taken() -> None:
    calls = flights(4, "a") + flights(1, "b")
    line = line_of(calls)
    line.remove(calls[1])
    line.remove(calls[4])
    line.remove(calls[4])
    assert (len(line), take(line, credit(9))) == (3, [calls[0], *calls[2:4]])


def test_tenants_that_are_gone_leave_nothing_behind() -> None:
    line = FairQueue()
    for number in range(10 * waiting.LINES_KEPT):
        line.put(*flights(1, f"t{number}"))
        take(line, credit(9))
    assert len(line._priorities["train"].lines) + len(line._priorities["train"].order) == 0


def test_tenants_that_are_gone_are_forgotten_while_another_one_waits() -> None:
    line = line_of(flights(30_000, "a"))
    for number in range(10 * waiting.LINES_KEPT):
        line.put(*flights(1, f"t{number}"))
        take(line, credit(2))
    assert len(line._priorities["train"].lines) <= waiting.LINES_KEPT + 1
