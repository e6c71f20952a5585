"""The name under which a pickle finds a patched function."""

from __future__ import annotations

import pytest

from trl_hotfix.patching import pickled, references

ID = "acme/marks-loss"


def test_a_reference_of_a_function_keeps_the_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = ("trl.trainer.utils", "pad", ((ID, 3, (("over", "all"),)), ("some-patch", 1, ())))
    name = references.name_of(reference)
    assert "." not in name
    monkeypatch.setattr(pickled, "restore", lambda restored: restored)
    assert getattr(pickled, name) == reference
