"""Cases of a parametrized test that `make test` leaves to `make slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(cases: Iterable[Any], whole: bool = False) -> list[Any]:
    """Mark each case as slow; `whole`: a case is one argument rather than a tuple of them."""
    return [pytest.param(*((case,) if whole else case), marks=pytest.mark.slow) for case in cases]
