"""Show the answer of ``doctor`` in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ...reporting.table import block, facts, show
from .answer import Answer

COUNTED = {
    "patches": "patches",
    "known": "bugs without a repair",
    "fingerprints": "releases",
    "proven": "cells",
    "evidence": "trainings",
}


def print_answer(answer: Answer) -> None:
    for entry in answer["problems"]:
        show(block(f"PROBLEM  {entry['problem']}", 0, style="bold red", hanging=2))
        show(block(f"-> {entry['remedy']}", 3, hanging=3))
    if not answer["problems"]:
        show(Text("no problem found", style="green"))
    show(Text())
    show(facts(list(_lines(answer))))


def _lines(answer: Answer) -> Iterator[tuple[str, str]]:
    python, trl, hook = answer["python"], answer["trl"], answer["hook"]
    yield "trl_hotfix", f"{answer['trl_hotfix']} in {answer['folder']}"
    yield "Python", f"{python['version']} {' '.join(python['flags'])} {python['executable']}".replace("  ", " ")
    yield "platform", python["platform"]
    yield "TRL", f"{trl['version']}, {trl['kind']}, in {trl['folder']}" if trl["version"] else "none"
    for folder in trl["others"]:
        yield "another TRL", folder
    yield "beside it", ", ".join(f"{name} {version or '-'}" for name, version in answer["packages"].items())
    yield "set", f"{answer['applies']} patches apply here, digest {answer['digest']}" if answer["digest"] else "none"
    yield "TRL_HOTFIX=1", "works: a fresh Python waits for TRL" if hook["effective"] else "does not work"
    for variable in answer["variables"]:
        wrong = f"   WRONG: {variable['problem']}" if variable["problem"] else ""
        yield "variable", f"{variable['name']}={variable['value']}{wrong}"
    for patcher in answer["patchers"]:
        yield "patcher", f"{patcher['name']} {patcher['version']}: {patcher['does']}. Look at {patcher['look']}"
    yield "finders", ", ".join(answer["finders"]) or "none but Python's and ours"
    by_folder: dict[str, list[str]] = {}
    for pth_file in answer["pth"]:
        label = f"{pth_file['name']} (ours)" if pth_file["ours"] else pth_file["name"]
        by_folder.setdefault(pth_file["folder"], []).append(label)
    for folder, labels in by_folder.items():
        yield ".pth files", f"{folder}: {', '.join(labels)}"
    for name, file in answer["files"].items():
        count = "unreadable" if file["count"] is None else f"{file['count']} {COUNTED[name]}"
        digest = file["sha256"][:16] if file["sha256"] else "none"
        yield name, f"{count}, {file['path']}, sha256 {digest}"
    for pack in answer["packs"]:
        yield "pack", f"{pack['name']} of {pack['release']}, {'named' if pack['named'] else 'not named'}"
