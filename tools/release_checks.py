"""Refuse a release whose tag, version, changelog, citation and addresses do not agree.

``python -m tools.release_checks v0.2.0 https://github.com/OWNER/trl_hotfix`` ends with 1 and a line for each
mistake. ``.github/workflows/release.yml`` runs it. It needs nothing but Python 3.11.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

CHECKOUT = Path(__file__).parents[1]


def version(checkout: Path = CHECKOUT) -> str:
    text = (checkout / "trl_hotfix" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise ValueError('trl_hotfix/__init__.py has no line __version__ = "..."')
    return match[1]


def disagreements(checkout: Path = CHECKOUT) -> Iterator[str]:
    """Give what does not agree with the version, at any time."""
    now = version(checkout)
    newest = re.search(r"^## (\S+) - (\S+)", (checkout / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if newest is None or newest[1] != now:
        yield f"CHANGELOG.md: expected a newest section '## {now} - ...', found {newest[0] if newest else 'none'!r}"
    cited = re.search(r"^version: (.+)$", (checkout / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    if cited is None or cited[1] != now:
        yield f"CITATION.cff: expected version: {now}, found {cited[1] if cited else 'none'}"
    supported = now.rpartition(".")[0]
    if f"the newest release, now {supported} " not in (checkout / "SECURITY.md").read_text(encoding="utf-8"):
        yield f"SECURITY.md: expected the newest release, now {supported}, among the supported versions"


def mistakes(tag: str, repository: str, checkout: Path = CHECKOUT) -> Iterator[str]:
    """Give what must not be released from ``tag`` of ``repository``."""
    yield from disagreements(checkout)
    now = version(checkout)
    if tag != f"v{now}":
        yield f"the tag is {tag}, and the version in trl_hotfix/__init__.py is {now}"
    changelog = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(now)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md: the section of {now} has no day, such as '## {now} - 2026-11-25'"
    with (checkout / "pyproject.toml").open("rb") as file:
        urls = tomllib.load(file)["project"].get("urls", {})
    if urls.get("Repository") != repository:
        found = urls.get("Repository", "none")
        yield f'pyproject.toml: expected Repository = "{repository}" in [project.urls], found {found}'


if __name__ == "__main__":
    found = list(mistakes(sys.argv[1], sys.argv[2]))
    print("\n".join(found) or "the release agrees with its tag")
    sys.exit(bool(found))
