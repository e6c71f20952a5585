"""Make the page "your stack": the bugs that a combination of versions has, and what we know of the layers under TRL."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from packaging.utils import canonicalize_name

from trl_hotfix.matching import gates
from trl_hotfix.model import Bug, Patch, Severity
from trl_hotfix.reporting.sentences import fixed_of, repair_of

from bench.releases import layout
from tools.pages import release_pages

PATH = "your-stack.md"
NOT_CHECKED = "vLLM, bitsandbytes, tokenizers, datasets and torch"
EXAMPLES = (
    ("0.11.4", "tf4.44"),
    ("0.16.1", "tf4.51"),
    ("0.19.1", "tf4.51"),
    ("0.24.0", "tf4.57"),
    ("1.7.1", "tf5.2"),
    ("1.16.0", "tf5.23"),
)
"""A release that people pin, and a stack that it runs on."""


def data(suffix: str) -> dict[str, Any]:
    """Return what the script reads. ``suffix`` is how an address of a page ends."""
    severities = list(Severity)
    bugs = sorted(release_pages.bugs(), key=lambda bug: (severities.index(bug.severity), bug.id))
    newest_release, newest_stack = EXAMPLES[-1]
    return {
        "packages": ["trl", *_layers()],
        "example": {"trl": newest_release, **_versions(newest_stack)},
        "bugs": [
            {
                "id": bug.id,
                "title": bug.title,
                "severity": bug.severity.value,
                "layer": bug.layer or "trl",
                "trl": _ranges(bug),
                "requires": dict(bug.requires),
                "fixed": fixed_of(bug),
                "repair": repair_of(bug),
                "page": f"bugs/{bug.id}{suffix}",
            }
            for bug in bugs
        ],
    }


def page(directory_urls: bool) -> str:
    """Return the page. Without scripts it has the tables alone."""
    suffix = "/" if directory_urls else ".html"
    up = "../" if directory_urls else ""
    text = json.dumps({**data(suffix), "up": up}, separators=(",", ":")).replace("</", "<\\/")
    return "\n".join([*_lines(text), ""])


def _lines(text: str) -> Iterator[str]:
    yield "# Your stack"
    yield ""
    yield (
        "A bug may be TRL's, or that of a layer beneath it. Your run is wrong either way. Give the versions that you "
        "have, or let `trl-hotfix audit <(pip freeze)` read them."
    )
    yield ""
    yield '<form id="stack" class="stack" hidden><p id="stack-packages"></p>'
    yield '<p id="stack-count" role="status"></p><ul id="stack-bugs"></ul></form>'
    yield f'<script id="stack-data" type="application/json">{text}</script>'
    yield ""
    yield "## Bugs of the layers"
    yield ""
    yield "These hit TRL's trainers, and are in no release of TRL's own code."
    yield ""
    yield "| bug | of | versions with it | with TRL | fixed in |"
    yield "|---|---|---|---|---|"
    for bug in sorted(_of_layers(), key=lambda bug: (bug.layer or "", bug.id)):
        needs = ", ".join(f"{name} `{versions}`" for name, versions in bug.requires.items())
        link = f"[{bug.title}](bugs/{bug.id}.md)"
        yield f"| {link} | {bug.layer} | {needs} | `{bug.trl}` | {fixed_of(bug) or 'no release'} |"
    yield ""
    yield "## Six stacks"
    yield ""
    yield "| TRL | with | TRL's bugs | bugs of the layers |"
    yield "|---|---|---|---|"
    for release, stack in EXAMPLES:
        yield _row(release, _versions(stack))
    yield ""
    yield "`deepspeed` is in none of them; a bug that needs it is not counted."
    yield ""
    yield "## What we checked"
    yield ""
    yield "The bench trains with these versions. Where a range ends between two of them, we read the code in between."
    yield ""
    yield "| package | versions |"
    yield "|---|---|"
    for name in _layers():
        yield f"| {name} | {', '.join(_checked(name))} |"
    yield ""
    yield f"We have not searched {NOT_CHECKED} for bugs of their own. vLLM needs a GPU, and a stand-in takes its place."


def _row(release: str, versions: dict[str, str]) -> str:
    bugs = present(release, versions)
    of_layers = [bug for bug in bugs if bug.layer is not None]
    links = "<br>".join(f"[{bug.id}](bugs/{bug.id}.md)" for bug in of_layers)
    with_these = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"| {release} | {with_these} | {len(bugs) - len(of_layers)} | {links or 'none'} |"


def present(release: str, versions: dict[str, str]) -> list[Bug]:
    """Return the bugs that these versions have."""
    return [
        bug
        for bug in release_pages.bugs()
        if gates.has_bug(release, bug) and all(need.met for need in gates.requirements(bug, versions.get))
    ]


def _ranges(bug: Bug) -> list[str]:
    """Return ranges of TRL releases. A release in one of them has the bug."""
    return sorted({bug.range_of(target) for target in bug.targets}) if isinstance(bug, Patch) else [bug.trl]


def _of_layers() -> list[Bug]:
    return [bug for bug in release_pages.bugs() if bug.layer is not None]


@functools.cache
def _layers() -> list[str]:
    """Return the packages beneath TRL that a bug depends on, that of the most bugs first."""
    names = [name for bug in release_pages.bugs() for name in bug.requires]
    return sorted(set(names), key=lambda name: (-names.count(name), name))


@functools.cache
def _versions(stack: str) -> dict[str, str]:
    """Return the versions of these packages on a stack."""
    pins = dict(line.split("==") for line in layout.lock(stack).read_text().split() if "==" in line)
    known = {str(canonicalize_name(name)): version for name, version in pins.items()}
    return {name: known[name] for name in _layers() if name in known}


def _checked(package: str) -> list[str]:
    """Return the versions of a package that the stacks have, or the folders beside them."""
    overlays = [pin for packages in layout.settings()["overlays"].values() for pin in packages]
    beside = {pin.split("==")[1] for pin in overlays if pin.split("==")[0] == package and "==" in pin}
    of_stacks = (_versions(stack).get(package) for stack in layout.stacks())
    return sorted({*beside, *filter(None, of_stacks)}, key=layout.Version)
