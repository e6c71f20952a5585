"""A record that cannot be written is a warning, and training goes on."""

from __future__ import annotations

import logging

import pytest

from trl_hotfix.errors import NotAppliedError
from trl_hotfix.recording.failures import training_goes_on


def test_an_error_of_the_record_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with training_goes_on("the file is missing"):
        raise OSError("No space left on device")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the file is missing (OSError: No space left on device)" in record.getMessage()


@pytest.mark.parametrize("error", [NotAppliedError(["some-patch"]), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_strict_errors_and_interrupts_are_raised(error: BaseException) -> None:
    with pytest.raises(type(error)), training_goes_on(""):
        raise error
