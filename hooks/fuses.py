"""The guard's own faults: counted per site, logged once, and a site is disarmed after too many."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddtree_guard.errors import Violation

log = logging.getLogger("ddtree_guard")
LIMIT = 3  # faults after which a site is left alone


class Fuses:
    """Keeps the guard's own exceptions away from SGLang.

    `strict` (mode raise) lets them through, so that a test run never passes unguarded. A Violation
    is not a fault of the guard and always passes. `told` hears of every fault: its site, and
    whether that disarms it.
    """

    def __init__(
        self,
        limit: int = LIMIT,
        strict: bool = False,
        told: Callable[[str, bool], None] | None = None,
    ) -> None:
        self.limit = limit
        self.strict = strict
        self.told = told
        self.faults: Counter[str] = Counter()

    def intact(self, site: str) -> bool:
        """Whether the site is still armed."""
        return self.faults.get(site, 0) < self.limit

    @contextmanager
    def internal(self, site: str, may_raise: bool = True) -> Iterator[None]:
        """Run guard code of a site. `may_raise` False (inside a capture) holds back everything."""
        try:
            yield
        except Exception as error:
            if self.passes(site, error, may_raise):
                raise

    def passes(self, site: str, error: Exception, may_raise: bool = True) -> bool:
        """Whether what guard code of a site has raised goes on to SGLang; counts what does not
        concern it. Call it where the exception is handled.
        """
        if isinstance(error, Violation):
            return may_raise
        self._count(site)
        return self.strict and may_raise

    def disarmed(self) -> tuple[str, ...]:
        """The sites that are left alone, in order of their names."""
        return tuple(sorted(site for site in self.faults if not self.intact(site)))

    def _count(self, site: str) -> None:
        self.faults[site] += 1
        if self.told is not None:
            self.told(site, not self.intact(site))
        if self.faults[site] == 1:
            log.exception(
                "ddtree_guard internal site=%s: our bug; the server is not affected", site
            )
        if self.faults[site] == self.limit:
            log.error(
                "NOT GUARDED: site %s failed %d times and is disarmed; report the exception above; "
                "serving continues unchecked there",
                site,
                self.limit,
            )
