"""The tests of patches run inside one release of TRL, with the patch that their file is named after.

``make patches PATCHES=some-id`` runs them on the first and on the newest release that has the bug. Each test begins
with its patch on, as ``apply()`` puts it on; the fixture ``switch`` takes it off and puts it on with other options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch
from trl_hotfix.patching import engine
from trl_hotfix.reporting.report import Report
from trl_hotfix.testing import recorded_warnings


class Switch:
    """Has the patch of a test on, or off."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def on(self, **options: str) -> AbstractContextManager[Report]:
        """Have the patch on with these options, for the block of a ``with`` statement."""
        chosen = {self._patch.id: options} if options else None
        # A test also runs on bodies that are not on record yet.
        return engine.ENGINE.patched((self._patch.id,), strict=True, options=chosen, unknown_body="try")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have TRL as it is, for the block of a ``with`` statement."""
        trl_hotfix.revert()
        try:
            yield
        finally:
            trl_hotfix.apply(only=[self._patch.id], unknown_body="try")


@pytest.fixture
def switch(request: pytest.FixtureRequest) -> Switch:
    name = Path(request.path).stem.removeprefix("test_").replace("_", "-")
    (patch,) = (patch for patch in loading.load() if patch.id == name)
    return Switch(patch)


@pytest.fixture(autouse=True)
def patched(switch: Switch) -> Iterator[None]:
    """Have the patch on during each test."""
    with switch.on():
        yield


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
