"""Compares the outcome of a program with that of a fresh plain interpreter."""

import msgspec

from loadtest.bench.agent import CUT, SHOWN_CHARS, Outcome

STARVED = "timeout (infra)"  # a time-out while the program got no CPU: correct on a busy machine, and counted


def as_shown(agent: str, reference: Outcome, outcome: Outcome) -> Outcome:
    """The reference as this agent returns it: code-judge's endpoint cuts both streams."""
    if agent != "long-batch":
        return reference
    last_line = outcome.last_line if outcome.last_line == CUT else reference.last_line
    return msgspec.structs.replace(reference, stdout=reference.stdout[:SHOWN_CHARS], last_line=last_line)


def difference(reference: Outcome, outcome: Outcome) -> str:
    """How an outcome differs from that of a plain interpreter; empty if it does not."""
    if outcome.status != reference.status:
        return f"status {outcome.status!r} instead of {reference.status!r} ({outcome.last_line[:100]!r})"
    if reference.status == "timeout":  # a plain interpreter loses output that was not flushed
        return "" if outcome.stdout.startswith(reference.stdout) else f"stdout {outcome.stdout[:100]!r} before the time-out"
    if outcome.stdout != reference.stdout:
        return f"stdout {outcome.stdout[:100]!r} instead of {reference.stdout[:100]!r}"
    if reference.status == "error" and outcome.last_line != reference.last_line:
        return f"traceback ends in {outcome.last_line[:100]!r} instead of {reference.last_line[:100]!r}"
    return ""
