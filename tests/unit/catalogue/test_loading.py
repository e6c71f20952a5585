"""The shipped catalogue, and a file that cannot be read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.example_entry import SHIPPED

from trl_hotfix.catalogue import loading
from trl_hotfix.commands.new import LONGEST_TITLE
from trl_hotfix.errors import CatalogueError
from trl_hotfix.matching import gates, versions
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Bug, Patch


def test_the_shipped_catalogue_loads() -> None:
    assert SHIPPED
    assert all(isinstance(patch, Patch) for patch in SHIPPED)


def test_the_shipped_catalogue_is_read_once() -> None:
    assert loading.load() is loading.load()


@pytest.mark.parametrize("bug", [*SHIPPED, *loading.without_repair()], ids=lambda bug: bug.id)
def test_a_title_reads_right_after_bug_in_a_line_of_the_log(bug: Bug) -> None:
    assert len(bug.title) <= LONGEST_TITLE, f"{len(bug.title)} characters: {bug.title}"
    assert not bug.title.endswith(".")
    assert bug.title.isprintable()


def test_no_two_bugs_have_one_title() -> None:
    titles = Counter(bug.title.lower() for bug in (*SHIPPED, *loading.without_repair()))
    assert [title for title, count in titles.items() if count > 1] == []


def test_the_shipped_bugs_without_a_repair_are_in_some_release_and_end_where_they_are_fixed() -> None:
    for bug in loading.without_repair():
        releases = [trl for trl in bodies().releases if gates.has_bug(trl, bug)]
        assert releases, bug.id
        fixed_in = bug.upstream.fixed_in
        assert fixed_in is None or (fixed_in in bodies().releases and not gates.has_bug(fixed_in, bug)), bug.id
        assert any(any(versions.in_range(trl, hit.trl or "") for trl in releases) for hit in bug.hits), bug.id


def test_patches_are_read_without_the_bugs_that_have_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise AssertionError("known.yaml is read")

    monkeypatch.setattr(loading, "known_bugs_file", refuse)
    assert loading.load.__wrapped__() == SHIPPED
    assert loading.known([]) == SHIPPED
    with pytest.raises(AssertionError, match="is read"):
        loading.without_repair.__wrapped__()


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
