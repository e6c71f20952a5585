"""The tests of patches run inside one release of TRL, with the patch that their file is named after.

``make patches PATCHES=some-id`` runs them on the first and on the newest release that has the bug. Each test begins
with its patch on, as ``apply()`` puts it on; the fixture ``switch`` takes it off and puts it on with other options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import trl_hotfix
from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch
from trl_hotfix.patching import engine
from trl_hotfix.reporting.report import Report


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
