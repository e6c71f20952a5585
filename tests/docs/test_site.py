"""The environment of `make docs` builds the site without a warning, and the site loads nothing from other hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading, on_record
from trl_hotfix.matching import fingerprints
from trl_hotfix.reporting.sentences import links

CHECKOUT = Path(__file__).parents[2]
MKDOCS = CHECKOUT / ".venv-docs" / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.is_file():
        pytest.fail(f"{MKDOCS} is not there: `make docs` sets it up")
    out = tmp_path_factory.mktemp("site")
    # Nothing listens at these proxies, so that an access to the network fails.
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    variables = {**os.environ, **dead, "PYTHONPATH": str(CHECKOUT)}
    before = _status()
    command: list[str | Path] = [MKDOCS, "build", "--strict", "--site-dir", out]
    process = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert _status() == before, "the build writes into the checkout"
    return out


def _status() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (CHECKOUT / "docs").rglob("*") if "__pycache__" not in path.parts}


def test_each_bug_has_a_page_with_all_that_is_declared_of_it(site: Path) -> None:
    index = (site / "bugs" / "index.html").read_text(encoding="utf-8")
    for patch in loading.load():
        text = (site / "bugs" / f"{patch.id}.html").read_text(encoding="utf-8")
        declared = [
            patch.severity.value,
            patch.trl,
            patch.upstream.fixed_in or "",
            on_record.in_words(patch),
            *patch.options,
        ]
        declared += [target.attribute for target in patch.targets] + [str(patch.review_by or "")] + list(patch.requires)
        declared += links(patch.upstream)
        for value in declared:
            assert value in text or value.replace(">", "&gt;").replace("<", "&lt;") in text, (patch.id, value)
        assert f'href="{patch.id}.html"' in index


def test_the_numbers_of_a_proof_are_those_on_record(site: Path) -> None:
    patch = next(patch for patch in loading.load() if patch.id == "dpo-aux-loss-dropped")
    proven = [proof for proof in on_record.proofs_of(patch) if proof["verdict"] == "proven"]
    text = (site / "bugs" / f"{patch.id}.html").read_text(encoding="utf-8")
    newest = text.partition(f"With the real trainer, TRL {proven[-1]['release']}")[2]
    # Of the same release on another stack the losses may differ in the last digits.
    shown = [
        all(f">{proof['runs'][run]['full']['measured']:.6g}<" in newest for run in ("red", "green"))
        for proof in proven
        if proof["release"] == proven[-1]["release"]
    ]
    assert any(shown)
    assert "<svg" in text.partition("With the real trainer")[0]


class _Loads(HTMLParser):
    """The addresses that a browser fetches for a page, without the links that a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        for name in ("src", "srcset", "data", "poster", *(["href"] if tag in ("link", "use", "image") else [])):
            if values.get(name):
                self.addresses.append(values[name] or "")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(loading.load())
    for page in pages:
        text = page.read_text(encoding="utf-8")
        parser = _Loads()
        parser.feed(text)
        assert 'class="mermaid"' not in text, "the theme would load mermaid.js from unpkg.com"
        assert [address for address in parser.addresses if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_schemas_and_the_matrix_are_published(site: Path) -> None:
    for schema in (CHECKOUT / "docs" / "schemas").glob("*.json"):
        assert (site / "schemas" / schema.name).read_bytes() == schema.read_bytes()
    page = (site / "evidence" / "matrix.html").read_text(encoding="utf-8")
    assert all(f">{patch.id}</a>" in page or f">{patch.id}<small>" in page for patch in loading.load())


def test_the_picture_of_the_first_page_leads_to_the_matrix(site: Path) -> None:
    assert (site / "matrix.svg").read_bytes() == (CHECKOUT / "docs" / "matrix.svg").read_bytes()
    index = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="evidence/matrix.html"><img [^>]*src="matrix.svg"', index)


def test_the_site_is_searched_from_disk(site: Path) -> None:
    """A page from disk may fetch nothing: the index is a script, and the worker of the search runs in a frame."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    words = json.loads(index.removeprefix("var __index = "))
    assert any(entry["location"].startswith("bugs/grpo-dapo-normaliser.html") for entry in words["docs"])
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="iframe-worker.js"' in home
    assert (site / "iframe-worker.js").is_file()


def test_the_chooser_of_the_first_page_has_each_trainer_and_release_and_leads_to_pages_that_there_are(
    site: Path,
) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="chooser-data" type="application/json">(.*?)</script>', home, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    releases = list(fingerprints.bodies().releases)
    assert data["releases"] == releases[::-1]
    assert {name for row in data["hit"].values() for name in row} == {*data["trainers"]}
    assert [name for name in data["trainers"] if name in data["hit"]["1.9.0"]] == list(data["hit"]["1.9.0"])
    assert all((site / bug["page"]).is_file() for bug in data["bugs"])
    pages = {bug["page"]: index for index, bug in enumerate(data["bugs"])}
    dapo = pages["bugs/grpo-dapo-normaliser.html"]
    assert dapo in data["hit"]["1.9.0"]["GRPO"]
    assert dapo not in data["hit"]["1.9.1"]["GRPO"]
    assert not any(dapo in bugs for row in data["hit"].values() for trainer, bugs in row.items() if trainer != "GRPO")
    assert 'src="chooser.js"' in home
