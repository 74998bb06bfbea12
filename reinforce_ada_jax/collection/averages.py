"""Decayed averages over the iterations before: constants for the next one, because none of its outcomes is in them."""

import dataclasses
from collections.abc import Mapping

# Weight of an iteration in the averages after the next one: half of an average is from the last iteration.
DECAY = 0.5

Sums = Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Averages:
    """Decayed averages.

    Attributes:
      sums: by name, the decayed total of what was observed, and the decayed number of observations.
    """

    sums: Sums = dataclasses.field(default_factory=dict)

    def mean(self, name: str, default: float) -> float:
        """Returns an average; `default` where nothing was observed."""
        total, count = self.sums.get(name, (0.0, 0.0))
        return total / count if count else default

    def after(self, observed: Sums) -> "Averages":
        """Returns the averages after an iteration with these totals and numbers of observations."""
        names = sorted({*self.sums, *observed})
        none = 0.0, 0.0
        pairs = ((self.sums.get(name, none), observed.get(name, none)) for name in names)
        decayed = [(DECAY * before[0] + now[0], DECAY * before[1] + now[1]) for before, now in pairs]
        return Averages(dict(zip(names, decayed, strict=True)))
