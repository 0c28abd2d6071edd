"""Names that callers choose, as labels of metrics: a few at a time, so that no caller can fill a Prometheus."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

OTHER = "other"
NONE = "none"  # of a call that names none: an empty label would be no label


class BoundedLabels:
    """A name has a label of its own while it is one of the `most` that were seen last; the rest is `other`.

    It makes room only when it was not seen for `idle_s`. Otherwise many names in turns would push each other out, and every
    change makes new series.
    """

    def __init__(
        self, most: int, idle_s: float, forget: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._idle_s, self._forget, self._clock = most, idle_s, forget, clock
        self._seen: OrderedDict[str, float] = OrderedDict()  # the longest unseen first

    def label(self, name: str) -> str:
        if not name:
            return NONE
        if name not in self._seen and not self._make_room():
            return OTHER
        self._seen[name] = self._clock()
        self._seen.move_to_end(name)
        return name

    def _make_room(self) -> bool:
        if len(self._seen) < self._most:
            return True
        oldest, seen_at = next(iter(self._seen.items()))
        if self._clock() - seen_at < self._idle_s:
            return False
        del self._seen[oldest]
        self._forget(oldest)
        return True
