"""The scripts of ``tests/corpus``, how each is started and scanned, and what is true of it when it runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml
from click.testing import CliRunner

from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.commands import scan
from trl_hotfix.commands.common import known_bugs
from trl_hotfix.matching.hits import Answer, finding
from trl_hotfix.scanning.notebooks import as_script

from .recording_trl import Recorded, Recorder

CORPUS = Path(__file__).parents[1] / "corpus"
RELEASES = ("0.19.1", "1.16.0")
_VERSIONS = {
    "0.19.1": {"transformers": "4.53.3", "peft": "0.15.2", "deepspeed": "0.17.5"},
    "1.16.0": {"transformers": "5.23.0", "peft": "0.18.0", "deepspeed": "0.19.8"},
}
_OF_CONFIG = """\
from trl import ModelConfig, {name}Config, {name}Trainer, TrlParser
args, model = TrlParser(({name}Config, ModelConfig)).parse_args_and_config()
{name}Trainer(model.model_name_or_path, args=args{more}).train()
"""


@dataclass(frozen=True, eq=False)
class Run:
    """A script that is started: on a release, with a command line, in an environment.

    ``options`` has the options of ``scan`` that tell more, and ``facts`` what is true of the files that they name.
    ``trainer`` is that of a config.
    """

    file: str
    release: str
    options: tuple[str, ...] = ()
    words: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    trainer: str | None = None

    @property
    def path(self) -> Path:
        return CORPUS / self.file

    @property
    def all_versions(self) -> dict[str, str]:
        return {**_VERSIONS[self.release], **self.versions}

    def __str__(self) -> str:
        return " ".join([self.file, self.release, *self.options, *(["--", *self.words] if self.words else [])])


def runs() -> list[Run]:
    """Return the runs of all scripts: those of ``runs.yaml``, and of another one a start with nothing told."""
    listed: Mapping[str, list[Mapping[str, Any]]] = yaml.safe_load((CORPUS / "runs.yaml").read_text())
    scripts = [path for suffix in ("py", "ipynb", "yaml") for path in CORPUS.glob(f"*/*.{suffix}")]
    names = sorted(path.relative_to(CORPUS).as_posix() for path in scripts)
    entries = {name: listed.get(name, [{}] if not name.endswith(".yaml") else []) for name in names}
    return [run for name, entry in entries.items() for one in entry for run in _read(name, one)]


def _read(file: str, entry: Mapping[str, Any]) -> Iterator[Run]:
    entry = dict(entry)
    releases = str(entry.pop("trl", " ".join(RELEASES))).split()
    words = entry.pop("words", None)
    options = shlex.split(entry.get("options", ""))
    facts = _facts()
    for release in releases:
        yield Run(
            file,
            release,
            tuple(options),
            tuple(shlex.split(words)) if words is not None else None,
            entry.get("environment", {}),
            {name: value for file in options for name, value in facts.get(file, {}).items()},
            entry.get("versions", {}),
            entry.get("trainer"),
        )


@functools.cache
def _facts() -> Mapping[str, Mapping[str, Any]]:
    facts: Mapping[str, Mapping[str, Any]] = yaml.safe_load((CORPUS / "facts" / "facts.yaml").read_text())
    return facts


def recorded(run: Run) -> list[Recorded]:
    """Start a script as ``python script.py ...`` does, and return its trainers."""
    text = _text(run)
    words = ("--config", run.path.name) if run.trainer is not None else run.words or ()
    recorder = Recorder(run.release, str(run.path), words)
    keep = {name: module for name, module in sys.modules.items() if name.split(".")[0] not in recorder.modules}
    argv, path = [str(run.path), *words], [str(run.path.parent), *sys.path]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {**keep, **recorder.modules}, clear=True))
        stack.enter_context(mock.patch.dict(os.environ, run.environment))
        stack.enter_context(mock.patch.multiple(sys, argv=argv, path=path, dont_write_bytecode=True))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(_in_folder(run.path.parent))
        namespace = {"__name__": "__main__", "__file__": str(run.path)}
        exec(compile(text, str(run.path), "exec"), namespace)
    return recorder.trainers


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _text(run: Run) -> str:
    if run.trainer is not None:
        return _OF_CONFIG.format(name=run.trainer, more=", reward_funcs=len" if run.trainer == "GRPO" else "")
    if run.path.suffix == ".ipynb":
        return as_script(run.path.read_bytes(), run.file, 1 << 20)[0]
    return run.path.read_text()


def truth(run: Run, trainer: Recorded) -> dict[str, Answer]:
    """Return the answer for each bug, by what the trainer had when it trained.

    It is "cannot tell" only for what depends on facts that the run does not state.
    """

    def fact(name: str) -> Argument:
        known = name in run.facts
        return Argument(Kind.LITERAL, run.facts[name]) if known else Argument(Kind.UNKNOWN, reason="not stated")

    return {
        bug.id: finding(trainer.name, trainer.find, bug, run.release, version_of=run.all_versions.get, fact=fact).answer
        for bug in known_bugs(None)
    }


class Scanned(NamedTuple):
    """What the scan says of a script: its answers by the lines and names of trainers, and whether there may be more."""

    trainers: list[tuple[int, str, dict[str, Answer]]]
    uncertain: bool


def scanned(run: Run) -> Scanned:
    """Scan a script as it is started."""
    versions = [word for name, version in run.all_versions.items() for word in ("--with", f"{name}=={version}")]
    command = [str(run.path), "--trl", run.release, *versions, *run.options, "--all", "--json", "--fail-on", "never"]
    command += ["--trainer", run.trainer] if run.trainer is not None and "--trainer" not in command else []
    command += ["--", *run.words] if run.words is not None else []
    with _in_folder(run.path.parent):
        result = CliRunner().invoke(scan.command, command)
    if result.exit_code != 0 and "behind --" in result.output:
        # A command line that it cannot read.
        return Scanned([], True)
    assert result.exit_code == 0, result.output
    (file,) = json.loads(result.stdout)["files"]
    trainers = [
        (trainer["line"], trainer["trainer"].removesuffix("Trainer"), _answers(trainer)) for trainer in file["trainers"]
    ]
    return Scanned(trainers, bool(file["uncertain"]))


def _answers(trainer: Mapping[str, Any]) -> dict[str, Answer]:
    told = {bug["id"]: Answer.HIT for bug in trainer["hits"]}
    told |= {bug["id"]: Answer.CANNOT_TELL for bug in trainer["cannot_tell"]}
    return told | {bug["id"]: Answer(bug["answer"]) for bug in trainer["accepted"]}


class Verdicts(NamedTuple):
    """The false answers, in words; how many answers a run decides, and how many of these the scan cannot tell.

    ``trainers`` is the number of trainers that the run makes. ``hits``: it hits a bug.
    """

    false: list[str]
    decided: int
    cannot_tell: int
    trainers: int
    hits: bool


@functools.cache
def compare(run: Run) -> Verdicts:
    """Hold what the scan says of a script against its run."""
    said = scanned(run)
    false: list[str] = []
    decided = untold = 0
    hits = False
    trainers = recorded(run)
    for trainer in trainers:
        true = truth(run, trainer)
        hits = hits or Answer.HIT in true.values()
        decided += sum(answer is not Answer.CANNOT_TELL for answer in true.values())
        place = f"{run}: {trainer.name}Trainer, line {trainer.line}"
        of_line = [answers for line, name, answers in said.trainers if (line, name) == (trainer.line, trainer.name)]
        if run.trainer is not None:
            of_line = [answers for _, _, answers in said.trainers]
        if not of_line and not said.uncertain:
            false.append(f"{place}: the scan has no such trainer")
        if not of_line:
            untold += sum(answer is Answer.HIT for answer in true.values())
            decided -= sum(answer is Answer.NOT_HIT for answer in true.values())
        for answers in of_line:
            for bug, answer in true.items():
                told = answers.get(bug, Answer.NOT_HIT)
                if told is not answer and told is not Answer.CANNOT_TELL:
                    false.append(f"{place}: {bug}: {told.value}, and it is: {answer.value}")
                untold += told is Answer.CANNOT_TELL and answer is not Answer.CANNOT_TELL
    return Verdicts(false, decided, untold, len(trainers), hits)
