"""The site is built without a warning, by the environment that `make docs` has, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trl_hotfix.catalogue import evidence, loading
from trl_hotfix.reporting.sentences import links

CHECKOUT = Path(__file__).parents[2]
MKDOCS = CHECKOUT / ".venv-docs" / "bin" / "mkdocs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not MKDOCS.is_file():
        pytest.fail(f"{MKDOCS} is not there: `make docs` sets it up")
    out = tmp_path_factory.mktemp("site")
    # Proxies that nobody listens on: what asked the network would fail.
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    variables = {**os.environ, **dead, "PYTHONPATH": str(CHECKOUT)}
    before = _status()
    command: list[str | Path] = [MKDOCS, "build", "--strict", "--site-dir", out]
    done = subprocess.run(command, cwd=CHECKOUT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert _status() == before, "the build writes into the checkout"
    return out


def _status() -> dict[Path, int]:
    return {each: each.stat().st_mtime_ns for each in (CHECKOUT / "docs").rglob("*") if "__pycache__" not in each.parts}


def test_each_bug_has_a_page_with_all_that_is_declared_of_it(site: Path) -> None:
    index = (site / "bugs" / "index.html").read_text(encoding="utf-8")
    for patch in loading.load():
        text = (site / "bugs" / patch.id / "index.html").read_text(encoding="utf-8")
        said = [
            patch.severity.value,
            patch.trl,
            patch.upstream.fixed_in or "",
            evidence.in_words(patch),
            *patch.options,
        ]
        said += [each.attribute for each in patch.targets] + [str(patch.review_by or "")] + list(patch.requires)
        said += links(patch.upstream)
        for each in said:
            assert each in text or each.replace(">", "&gt;").replace("<", "&lt;") in text, (patch.id, each)
        assert f'href="{patch.id}/"' in index


def test_the_numbers_of_a_proof_are_those_on_record(site: Path) -> None:
    text = (site / "bugs" / "dpo-aux-loss-dropped" / "index.html").read_text(encoding="utf-8")
    newest = text.partition("With the real trainer, TRL 1.7.1")[2]
    for number in ("0.693147", "1.69426"):
        assert f">{number}<" in newest
    assert "<svg" in newest


class _Loads(HTMLParser):
    """What a browser would fetch for a page; links that a reader may follow are none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        its = dict(attributes)
        for name in ("src", "srcset", "data", "poster", *(["href"] if tag in ("link", "use", "image") else [])):
            if its.get(name):
                self.found.append(its[name] or "")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(loading.load())
    for page in pages:
        text = page.read_text(encoding="utf-8")
        parser = _Loads()
        parser.feed(text)
        assert 'class="mermaid"' not in text, "the theme would load mermaid.js from unpkg.com"
        assert [each for each in parser.found if re.match(r"(https?:)?//", each)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_schemas_and_the_matrix_are_published(site: Path) -> None:
    for each in (CHECKOUT / "docs" / "schemas").glob("*.json"):
        assert (site / "schemas" / each.name).read_bytes() == each.read_bytes()
    for name in ("matrix.svg", "matrix.html"):
        assert (site / "evidence" / name).read_bytes() == (CHECKOUT / "evidence" / name).read_bytes()
