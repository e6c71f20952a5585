"""Keep a run going when its record cannot be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import NotAppliedError, described_error
from ..log import event, warning


@contextlib.contextmanager
def training_goes_on(without: str) -> Iterator[None]:
    """Turn every error in writing a record, except ``NotAppliedError``, into a warning, so that training goes on.

    ``without`` tells in the warning what is missing.
    """
    try:
        yield
    except NotAppliedError:
        raise
    # A run trains correctly without its record, so an error in writing it must not end the run.
    except Exception as error:  # noqa: BLE001
        fields = event("no-record")
        warning("the record of the run is not complete, %s (%s)", without, described_error(error), extra=fields)
