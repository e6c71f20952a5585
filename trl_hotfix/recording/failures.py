"""A run does not end because its record cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import NotAppliedError
from ..log import log


@contextlib.contextmanager
def training_goes_on(without: str) -> Iterator[None]:
    """Whatever goes wrong with a record, training goes on; a record is one warning less, not one job less."""
    try:
        yield
    except NotAppliedError:
        raise
    # The same border as in a wrapper: what goes wrong here must not end a run that goes on without it.
    except Exception as error:  # noqa: BLE001
        log.warning("the record of the run is not complete, %s (%s: %s)", without, type(error).__name__, error)
