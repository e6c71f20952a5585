"""``doctor``: why does it not work here, and what belongs into an issue."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import site
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import click
from packaging.version import InvalidVersion, Version
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__, catalogue, evidence, fingerprint, gates, startup
from .. import packs as third_party
from ..engine import apply
from ..errors import HotfixError, plain, suggestion
from ..gates import Selection
from ..model import Patch, State
from ..report import show
from . import Exit, unsupported, with_packs

PACKAGE = __package__.partition(".")[0]

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "deepspeed", "vllm", "flash-attn", "liger-kernel", "datasets"),
    "wrapt",
)

PATCHERS = {
    "unsloth": "generates trainers anew from TRL's source text: what it generates has none of our patches",
    "unsloth-zoo": "replaces methods of TRL's trainers when unsloth is imported",
    "axolotl": "wraps methods of trainers, and has trainers of its own",
    "liger-kernel": "replaces the forward and the loss of transformers' models",
    "llamafactory": "has trainers of its own that override TRL's methods",
    "ms-swift": "deletes and overrides methods of TRL's trainers",
}
"""Distributions that change TRL or transformers when they are imported."""

COUNTED = {"patches": "patches", "fingerprints": "releases", "proven": "cells", "evidence": "trainings"}

LOOK = "states conflicted, displaced and unreached in trl_hotfix.status() after it was imported"

SECONDS = 120.0
"""For a fresh Python to start: on a slow disk, with a hundred nodes that start too."""


class Problem(TypedDict):
    problem: str
    remedy: str


class Python(TypedDict):
    version: str
    executable: str
    platform: str
    flags: list[str]
    """The options of this Python that decide which .pth files and variables it looks at: -S, -E, -I, -P, -s."""


class Trl(TypedDict):
    version: str | None
    supported: bool
    kind: str | None
    """``release``, or else ``development version``, ``fork`` (a local version), ``editable checkout``."""
    folder: str | None


class Hook(TypedDict):
    """``problem``: why TRL_HOTFIX=1 cannot work in this Python. ``effective``: was a fresh one seen waiting for TRL?"""

    problem: str | None
    effective: bool
    folder: str | None
    said: list[str]


class Variable(TypedDict):
    name: str
    value: str
    problem: str | None


class Patcher(TypedDict):
    name: str
    version: str
    does: str
    look: str


class PthFile(TypedDict):
    folder: str
    name: str
    ours: bool


class DataFile(TypedDict):
    """``count``: of patches; of releases whose bodies are known; of pairs of a patch and a release; of trainings."""

    path: str
    sha256: str | None
    count: int | None


class Pack(TypedDict):
    name: str
    release: str
    named: bool


class Answer(TypedDict):
    trl_hotfix: str
    folder: str
    problems: list[Problem]
    python: Python
    trl: Trl
    packages: dict[str, str | None]
    hook: Hook
    variables: list[Variable]
    patchers: list[Patcher]
    finders: list[str]
    pth: list[PthFile]
    files: dict[str, DataFile]
    packs: list[Pack]
    applies: int | None
    digest: str | None


@dataclass(slots=True)
class _Problems:
    found: list[Problem] = field(default_factory=list)

    def add(self, problem: str, remedy: str) -> None:
        each = Problem(problem=problem, remedy=remedy)
        if each not in self.found:
            self.found.append(each)


@click.command("doctor")
@click.option("--json", "as_data", is_flag=True, help="All of it as JSON.")
@with_packs
def command(as_data: bool, packs: str | None) -> int:
    """Why does it not work here? What is installed, set and found, to be pasted into an issue; problems first.

    Starts a fresh Python to see whether TRL_HOTFIX=1 reaches it. Of the environment only TRL_HOTFIX variables are
    shown, and home folders are ~.
    """
    answer = _examined(packs)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        _print(answer)
    if not answer["trl"]["supported"]:
        return Exit.NO_TRL
    return Exit.DEGRADED if answer["problems"] else Exit.FINE


def _examined(packs: str | None) -> Answer:
    problems = _Problems()
    trl = _trl(problems)
    hook, finders = _hook(problems)
    packages = {name: gates.installed(name) for name in PACKAGES}
    if packages["wrapt"] is None:
        problems.add("wrapt, which trl_hotfix needs, is not installed", "install trl_hotfix again, with what it needs")
    files, patches = _files(packs, problems)
    variables = _variables(patches, packs, problems)
    applies, digest = _set(packs, problems)
    answer = Answer(
        trl_hotfix=__version__,
        folder=str(Path(catalogue.__file__).parent),
        problems=problems.found,
        python=_python(),
        trl=trl,
        packages=packages,
        hook=hook,
        variables=variables,
        patchers=[
            Patcher(name=name, version=version, does=does, look=LOOK)
            for name, does in PATCHERS.items()
            if (version := gates.installed(name)) is not None
        ],
        finders=finders,
        pth=_pth_files(),
        files=files,
        packs=_packs(packs),
        applies=applies,
        digest=digest,
    )
    private: Answer = _without_home(answer)
    return private


def _python() -> Python:
    flags = {
        "-S": sys.flags.no_site,
        "-E": sys.flags.ignore_environment,
        "-I": sys.flags.isolated,
        "-P": getattr(sys.flags, "safe_path", False),
        "-s": sys.flags.no_user_site,
    }
    return Python(
        version=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        platform=platform.platform(),
        flags=[flag for flag, given in flags.items() if given],
    )


def _trl(problems: _Problems) -> Trl:
    version = gates.installed("trl")
    if version is None:
        problems.add(
            f"TRL is not installed in the environment of {sys.executable}",
            f"install TRL {gates.SUPPORTED} there, or run trl_hotfix with the Python that has it",
        )
        return Trl(version=None, supported=False, kind=None, folder=None)
    supported, kinds = False, []
    try:
        parsed = Version(version)
        supported = not unsupported(version)
        kinds = ["development version"] * parsed.is_devrelease + ["fork"] * (parsed.local is not None)
    except InvalidVersion:
        kinds = ["not a version"]
    if not supported:
        problems.add(f"TRL {plain(version)} is not supported", f"install TRL {gates.SUPPORTED}")
    its = metadata.distribution("trl")
    # Looked up, not imported: the folder that `import trl` would take.
    spec = find_spec("trl")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    there = Path(str(its.locate_file("trl")))
    if _is_editable(its):
        kinds.append("editable checkout")
    elif folder is not None and not (there.is_dir() and there.samefile(folder)):
        problems.add(
            f"`import trl` takes {folder}, but the version {version} is that of {there}",
            "one of the two is on the path by mistake: look at PYTHONPATH, the working folder, and for two installs",
        )
    if folder is None:
        problems.add(f"TRL {version} has metadata, but `import trl` finds no package", "install TRL again")
    kind = ", ".join(kinds) or "release"
    return Trl(version=version, supported=supported, kind=kind, folder=str(folder) if folder is not None else None)


def _is_editable(distribution: metadata.Distribution) -> bool:
    try:
        said: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return isinstance(said, dict) and bool((said.get("dir_info") or {}).get("editable"))


_LOOK = """
import json, sys
ours = [each for each in sys.meta_path if type(each).__module__ == "trl_hotfix.import_hooks"]
own = ("_frozen_importlib", "_frozen_importlib_external", "trl_hotfix.import_hooks")
kinds = [each if isinstance(each, type) else type(each) for each in sys.meta_path]
others = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__ not in own]
package = sys.modules.get("trl_hotfix")
print(json.dumps({"effective": bool(ours), "finders": others, "file": getattr(package, "__file__", None)}))
"""


def _hook(problems: _Problems) -> tuple[Hook, list[str]]:
    """Whether TRL_HOTFIX=1 works, seen in a fresh Python; and whose finders are on ``sys.meta_path`` there."""
    problem = startup.hook_problem()
    if problem is not None:
        problems.add(
            f"TRL_HOTFIX=1 does nothing here: {problem}", "mend that, or call trl_hotfix.apply() in the script"
        )
    seen, said = _in_a_fresh_python()
    file = seen.get("file")
    folder = str(Path(file).parent) if file else None
    effective = bool(seen.get("effective"))
    if not effective and problem is None:
        problems.add(
            "a fresh Python with TRL_HOTFIX=1 does not wait for TRL" + "".join(f"; it said: {each}" for each in said),
            f"install trl_hotfix again into the environment of {sys.executable}, or call trl_hotfix.apply()",
        )
    here = Path(catalogue.__file__).parent
    if folder is not None and not (Path(folder).is_dir() and here.samefile(folder)):
        problems.add(
            f"a fresh Python takes trl_hotfix from {folder}; this one is {here}",
            "one of the two is on the path by mistake: look at PYTHONPATH, the working folder, and for two installs",
        )
    return Hook(problem=problem, effective=effective, folder=folder, said=said), list(seen.get("finders", ()))


def _in_a_fresh_python() -> tuple[Mapping[str, Any], list[str]]:
    """What a fresh Python sees, and what it says of trl_hotfix on standard error."""
    environment = {**os.environ, "TRL_HOTFIX": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env=environment,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, [f"{type(error).__name__}: {plain(str(error))}"]
    # Of others' words on standard error nobody knows what is in them.
    said = [plain(line) for line in done.stderr.splitlines() if line.startswith("trl_hotfix")]
    try:
        # What else prints at the start of Python comes before.
        seen = json.loads((done.stdout.splitlines() or [""])[-1])
    except ValueError:
        return {}, [*said, f"no answer, exit code {done.returncode}"]
    return seen, said


def _files(packs: str | None, problems: _Problems) -> tuple[dict[str, DataFile], tuple[Patch, ...]]:
    """The data files of this package; and the patches that may be named, as far as they can be read."""
    patches: tuple[Patch, ...] = ()

    def of_manifest() -> int:
        nonlocal patches
        patches = catalogue.load()
        return len(patches)

    ways: dict[str, tuple[Path, Callable[[], int]]] = {
        "patches": (catalogue.manifest(), of_manifest),
        "fingerprints": (Path(fingerprint.__file__).with_name("fingerprints.json"), _releases),
        "proven": (Path(evidence.__file__).with_name("proven.json"), _pairs),
        "evidence": (evidence.file(), lambda: len(evidence.trainings()["proofs"])),
    }
    files = {}
    for name, (path, count) in ways.items():
        its = DataFile(path=str(path), sha256=None, count=None)
        try:
            its["count"] = count()
            its["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        except HotfixError as error:
            problems.add(str(error), "install trl_hotfix again, or mend the file if it is yours")
        except OSError as error:
            problems.add(f"{path} cannot be read: {error.strerror}", "install trl_hotfix again")
        files[name] = its
    try:
        patches += catalogue.known(third_party.named(packs, os.environ))[len(patches) :] if patches else ()
    except HotfixError as error:
        problems.add(str(error), "correct the name, or leave the pack out")
    return files, patches


def _releases() -> int:
    return len(fingerprint.bodies().releases)


def _pairs() -> int:
    return sum(len(each["releases"]) for each in evidence.proven().values())


def _variables(patches: tuple[Patch, ...], packs: str | None, problems: _Problems) -> list[Variable]:
    names = third_party.named(packs, os.environ)
    found = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRL_HOTFIX"):
            problem = _wrong(name, value, patches, names)
            if problem is not None:
                problems.add(f"{name}={plain(value)}: {problem}", f"correct it, or unset {name}")
            found.append(Variable(name=name, value=plain(value), problem=problem))
    if startup.switch(os.environ.get("TRL_HOTFIX", "") or "unset") == "off":
        problems.add(
            f"TRL_HOTFIX={os.environ['TRL_HOTFIX']} turns everything off, also an apply() in the script",
            "unset it, or set it to 1",
        )
    return found


def _wrong(name: str, value: str, patches: tuple[Patch, ...], packs: tuple[str, ...]) -> str | None:
    """What is wrong with a variable, or None."""

    def selection() -> str | None:
        # With a manifest that cannot be read, every id would be unknown.
        if patches:
            Selection.of(None, None, {name: value}, patches, None, packs)
        return None

    def of_packs() -> str | None:
        for pack in third_party.named(value, {}):
            third_party.find(pack)
        return None

    checks: dict[str, Callable[[], str | None]] = {
        "TRL_HOTFIX": lambda: _unless(startup.switch(value) is not None, "1, strict or 0; it is taken as off"),
        "TRL_HOTFIX_ONLY": selection,
        "TRL_HOTFIX_SKIP": selection,
        "TRL_HOTFIX_OPTIONS": selection,
        "TRL_HOTFIX_PACKS": of_packs,
        "TRL_HOTFIX_CALLBACK": lambda: _unless(startup.switch(value) in ("on", "off"), "1 or 0; it is taken as on"),
        "TRL_HOTFIX_PATIENCE": lambda: _unless(_is_seconds(value), "a number of seconds; it is taken as 60"),
        "TRL_HOTFIX_UNKNOWN_BODY": lambda: _unless(value in ("", "skip", "try"), "skip or try; apply() refuses it"),
    }
    if name not in checks:
        return f"trl_hotfix has no such variable{suggestion(name, checks)}"
    try:
        return checks[name]()
    except HotfixError as error:
        return str(error)


def _unless(fine: bool, expected: str) -> str | None:
    return None if fine else f"expected {expected}"


def _is_seconds(value: str) -> bool:
    try:
        return not value or 0 <= float(value) < math.inf
    except ValueError:
        return False


def _set(packs: str | None, problems: _Problems) -> tuple[int | None, str | None]:
    """How many patches would be on here, and the digest of the set."""
    try:
        report = apply(dry_run=True, packs=packs)
    except HotfixError as error:
        if not any(str(error) in each["problem"] for each in problems.found):
            problems.add(str(error), "correct it: until then nothing is patched")
        return None, None
    except InvalidVersion as error:
        problems.add(f"a version that is installed is none: {error}", "install that distribution again")
        return None, None
    return sum(each.state is State.PENDING for each in report), report.digest


def _pth_files() -> list[PthFile]:
    """What runs, or adds to the path, at every start of this Python: the names alone."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [
        PthFile(folder=folder, name=path.name, ours="trl_hotfix" in path.name)
        for folder in dict.fromkeys(folders)
        for path in sorted(Path(folder).glob("*.pth"))
    ]


def _packs(packs: str | None) -> list[Pack]:
    """The packs that are installed. Nothing of them is imported."""
    named = third_party.named(packs, os.environ)
    found = {
        (each.name, f"{each.dist.name}=={each.dist.version}" if each.dist is not None else "?")
        for each in metadata.entry_points(group=third_party.GROUP)
    }
    return [Pack(name=plain(name), release=plain(release), named=name in named) for name, release in sorted(found)]


def _without_home(value: Any) -> Any:
    """The same with ``~`` for the home folder in every text: its name is mostly that of its owner."""
    if isinstance(value, Mapping):
        return {key: _without_home(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_home(each) for each in value]
    if not isinstance(value, str):
        return value
    home = os.path.expanduser("~")  # noqa: PTH111  pathlib raises where a container's user has no home
    for each in sorted({home, os.path.realpath(home)} - {"~", "", os.sep}, key=len, reverse=True):
        value = re.sub(rf"(?<![\w.~/\\-]){re.escape(each.rstrip(os.sep))}(?![\w.-])", "~", value)
    return value


def _print(answer: Answer) -> None:
    for each in answer["problems"]:
        show(Text.assemble(("PROBLEM  ", "bold red"), each["problem"]))
        show(Text(f"   -> {each['remedy']}"))
    if not answer["problems"]:
        show(Text("no problem found", style="green"))
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    view.add_column(no_wrap=True)
    view.add_column(overflow="fold")
    for name, text in _lines(answer):
        view.add_row(Text(name), Text(text))
    show(view)


def _lines(answer: Answer) -> Iterator[tuple[str, str]]:
    python, trl, hook = answer["python"], answer["trl"], answer["hook"]
    yield "trl_hotfix", f"{answer['trl_hotfix']} in {answer['folder']}"
    yield "Python", f"{python['version']} {' '.join(python['flags'])} {python['executable']}".replace("  ", " ")
    yield "platform", python["platform"]
    yield "TRL", f"{trl['version']}, {trl['kind']}, in {trl['folder']}" if trl["version"] else "none"
    yield "beside it", ", ".join(f"{name} {version or '-'}" for name, version in answer["packages"].items())
    yield "set", f"{answer['applies']} patches apply here, digest {answer['digest']}" if answer["digest"] else "none"
    yield "TRL_HOTFIX=1", "works: a fresh Python waits for TRL" if hook["effective"] else "does not work"
    for variable in answer["variables"]:
        wrong = f"   WRONG: {variable['problem']}" if variable["problem"] else ""
        yield "variable", f"{variable['name']}={variable['value']}{wrong}"
    for patcher in answer["patchers"]:
        yield "patcher", f"{patcher['name']} {patcher['version']}: {patcher['does']}. Look at {patcher['look']}"
    yield "finders", ", ".join(answer["finders"]) or "none but Python's and ours"
    folders = dict.fromkeys(each["folder"] for each in answer["pth"])
    for folder in folders:
        names = (f"{each['name']}{' (ours)' * each['ours']}" for each in answer["pth"] if each["folder"] == folder)
        yield ".pth files", f"{folder}: {', '.join(names)}"
    for name, file in answer["files"].items():
        count = "unreadable" if file["count"] is None else f"{file['count']} {COUNTED[name]}"
        yield name, f"{count}, {file['path']}, sha256 {(file['sha256'] or 'none')[:16]}"
    for pack in answer["packs"]:
        yield "pack", f"{pack['name']} of {pack['release']}, {'named' if pack['named'] else 'not named'}"
