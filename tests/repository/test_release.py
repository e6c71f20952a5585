"""Version, changelog, citation and policy agree, and a release that does not is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
CHECKS = CHECKOUT / "tools" / "release_checks.py"
URL = "https://forge.example/somebody/trl_hotfix"
FILES = ("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", "trl_hotfix/__init__.py")


@pytest.fixture
def releasable(tmp_path: Path) -> Path:
    """A copy of the files that a release is checked by, as they are when 0.2.0 is released from ``URL``."""
    for name in (*FILES, "tools/release_checks.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, tmp_path / name)
    edit(tmp_path / "CHANGELOG.md", " - unreleased", " - 2026-12-01")
    edit(tmp_path / "pyproject.toml", "[project.urls]", f'[project.urls]\nRepository = "{URL}"')
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def checked(checkout: Path, tag: str = "v0.2.0", url: str = URL) -> tuple[int, str]:
    command = [sys.executable, str(checkout / "tools" / "release_checks.py"), tag, url]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return process.returncode, process.stdout + process.stderr


def test_version_changelog_citation_and_policy_agree() -> None:
    code, output = checked(CHECKOUT)
    # What else is said is said of the day and the address, which a release alone has.
    others = [line for line in output.splitlines() if "has no day" not in line and "[project.urls]" not in line]
    assert code == 1
    assert others == []


def test_a_release_that_agrees_passes(releasable: Path) -> None:
    assert checked(releasable) == (0, "the release agrees with its tag\n")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("CHANGELOG.md", "## 0.2.0", "## 0.3.0", "CHANGELOG.md: expected a newest section"),
        ("CHANGELOG.md", " - 2026-12-01", " - unreleased", "has no day"),
        ("CITATION.cff", "version: 0.2.0", "version: 0.1.0", "CITATION.cff: expected version: 0.2.0, found 0.1.0"),
        ("SECURITY.md", "now 0.2 ", "now 0.1 ", "SECURITY.md: expected the newest release, now 0.2"),
        ("trl_hotfix/__init__.py", '"0.2.0"', '"0.2.1"', "the tag is v0.2.0, and the version in"),
        ("pyproject.toml", "somebody", "somebody-else", "found https://forge.example/somebody-else/trl_hotfix"),
    ],
)
def test_what_does_not_agree_is_named(name: str, old: str, new: str, message: str, releasable: Path) -> None:
    edit(releasable / name, old, new)
    code, output = checked(releasable)
    assert code == 1
    assert message in output
