"""The tests of patches run inside one release of TRL, with the patch that their file is named after.

``make patches PATCHES=some-id`` runs them on the first and on the newest release that has the bug. Each test begins
with its patch on, as ``apply()`` puts it on; the fixture ``switch`` takes it off and puts it on with other options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch, State
from trl_hotfix.patching import engine
from trl_hotfix.reporting.report import Report
from trl_hotfix.testing import recorded_warnings


class Switch:
    """Has the patch of a test on, or off."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch
        self._was_off = False

    def on(self, **options: str) -> AbstractContextManager[Report]:
        """Have the patch on with these options, for the block of a ``with`` statement."""
        chosen = {self._patch.id: options} if options else None
        # A test also runs on bodies that are not on record yet.
        return engine.ENGINE.patched((self._patch.id,), strict=True, options=chosen, unknown_body="try")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have TRL as it is, for the block of a ``with`` statement."""
        self._was_off = True
        engine.ENGINE.revert(())
        try:
            yield
        finally:
            self._put_on(strict=False)

    def restore(self) -> None:
        """Put the patch on as at the beginning, if a test has had it off or has replaced its target."""
        # Without objects, as a search through all of the process takes longer than most tests.
        if self._was_off or engine.ENGINE.status(objects=())[self._patch.id].state is not State.APPLIED:
            engine.ENGINE.revert(())
            self._put_on(strict="all")
            self._was_off = False

    def _put_on(self, *, strict: Literal["all", False]) -> None:
        # Not by `apply()`: from then on every trainer of this process would have a record, and log it.
        engine.ENGINE.apply([self._patch.id], None, None, strict, unknown_body="try")


@pytest.fixture(scope="module")
def switch(request: pytest.FixtureRequest) -> Switch:
    name = Path(request.path).stem.removeprefix("test_").replace("_", "-")
    (patch,) = (patch for patch in loading.load() if patch.id == name)
    return Switch(patch)


@pytest.fixture(scope="module", autouse=True)
def patched(switch: Switch) -> Iterator[None]:
    """Have the patch on during the tests. To put it on for each would take as long as all else that they do."""
    with switch.on():
        yield


@pytest.fixture(autouse=True)
def still_patched(patched: None, switch: Switch) -> None:
    """Begin each test with the patch on."""
    switch.restore()


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Return what is logged as trl_hotfix, a line each, and keep it off of the log."""
    with recorded_warnings() as said:
        yield said


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the tokenizers that TRL gives to the functions it maps over a stream."""
    from datasets import IterableDataset

    found: list[Any] = []
    of_datasets = IterableDataset.map

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = kwargs.get("fn_kwargs") or {}
        found.extend(arguments[name] for name in ("tokenizer", "processing_class") if name in arguments)
        return of_datasets(self, *args, **kwargs)

    monkeypatch.setattr(IterableDataset, "map", recording)
    return found
