"""docs/packs.md shows files of the example. tests/process/test_packs.py installs and runs it."""

from __future__ import annotations

from tools.pages import generate

PAGE = (generate.DOCS / "packs.md").read_text(encoding="utf-8")


def test_the_site_shows_the_files_as_they_are() -> None:
    names = generate.FILE_MARK.findall(PAGE)
    assert {name.rpartition(".")[2] for name in names} == {"py", "toml", "yaml"}
    for name in names:
        text = (generate.EXAMPLE / name).read_text(encoding="utf-8")
        assert f"\n{text}```\n" in generate.shown(generate.EXAMPLE, name)


def test_the_page_names_every_file() -> None:
    files = [path for path in generate.EXAMPLE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) == 6
    for path in files:
        assert path.name in PAGE
