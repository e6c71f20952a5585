"""The shipped catalogue, and a file that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.example_entry import SHIPPED

from trl_hotfix.catalogue import loading
from trl_hotfix.errors import CatalogueError
from trl_hotfix.model import Patch


def test_the_shipped_catalogue_loads() -> None:
    assert SHIPPED
    assert all(isinstance(patch, Patch) for patch in SHIPPED)


def test_the_shipped_catalogue_is_read_once() -> None:
    assert loading.load() is loading.load()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not UTF-8"])
def test_an_unreadable_file_is_a_mistake(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "patches.yaml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(loading, "manifest", lambda: path)
    with pytest.raises(CatalogueError, match="cannot be read") as caught:
        loading.load.__wrapped__()
    assert caught.value.path == str(path)
