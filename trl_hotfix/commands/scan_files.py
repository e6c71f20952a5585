"""Scan files for some bugs on one release of TRL, and put the findings into the shape of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..catalogue.conditions import Argument, Lookup
from ..errors import LONG, ScriptError, printable
from ..matching.hits import Finding
from ..model import Bug as AnyBug
from ..reporting.sentences import fixed_in_layers, repair_of
from ..scanning.command_lines import texts
from ..scanning.facts import facts_for
from ..scanning.files import files_to_scan
from ..scanning.found import TrainerCall
from ..scanning.hits import ScannedTrainer, judge
from ..scanning.ignores import Ignore
from ..scanning.scripts import read
from .accepted import Ignores
from .ask_more import Asker
from .progress import progress
from .scan_answer import Accepted, Bug, File, NotUsed, Trainer, Unseen


class Scan:
    """Scan files for some bugs on one release of TRL.

    ``repaired`` has the ids of the bugs that the run would repair, or is None if nobody asks for them.
    """

    def __init__(
        self,
        bugs: Sequence[AnyBug],
        trl: str,
        other_release: bool,
        versions_told: Mapping[str, str],
        words: Sequence[str] | None,
        facts: Mapping[str, Argument],
        ignores: Ignores,
        repaired: frozenset[str] | None,
        asker: Asker,
    ) -> None:
        self._bugs, self._trl, self._other_release = bugs, trl, other_release
        self._versions_told = versions_told
        self._words, self._facts = words, facts
        self._ignores, self._repaired, self._asker = ignores, repaired, asker

    def files(self, paths: Sequence[str], yaml_trainer: str | None) -> tuple[list[File], int]:
        """Scan files and folders. Return what to show of them, and how many there are.

        Raises ``ScriptError`` for a file that is named and cannot be scanned.
        """
        files = files_to_scan(paths)
        if yaml_trainer is not None and any(path.suffix.lower() not in (".yaml", ".yml") for path, _ in files):
            raise ScriptError("--trainer is for a YAML config; a script says itself which trainers it makes")
        scanned = []
        with progress("scan", len(files)) as advance:
            for number, (path, is_named) in enumerate(files):
                advance(number, printable(path.name, LONG))
                scanned.append(self._scan(path, is_named, yaml_trainer))
        shown = [
            file
            for file, (_, is_named) in zip(scanned, files, strict=True)
            if is_named or file["trainers"] or file["uncertain"] or file["error"] is not None
        ]
        return shown, len(files)

    def _scan(self, path: Path, is_named: bool, yaml_trainer: str | None) -> File:
        try:
            calls, unseen, cells, unread = read(path, yaml_trainer, self._words)
        except ScriptError as error:
            if is_named:
                raise
            return {"file": str(path), "error": str(error), "trainers": [], "uncertain": [], "not_used": []}
        ignored = self._ignores.of_script(path)
        told, other = self._versions_told, self._other_release
        trainers = [
            judge(call, self._bugs, self._trl, other_release=other, told=told, fact=self._fact(path, call))
            for call in calls
        ]
        uncertain: list[Unseen] = [
            {"line": line, "position": cells.position(line), "reason": reason} for line, reason in unseen
        ]
        shown = [self._trainer(str(path), scanned, ignored) for scanned in trainers]
        not_used: list[NotUsed] = [{"words": option, "reason": reason} for option, reason in unread]
        return {"file": str(path), "error": None, "trainers": shown, "uncertain": uncertain, "not_used": not_used}

    def _fact(self, path: Path, call: TrainerCall) -> Lookup | None:
        """Return what is known of a trainer: by the files that the user names, and else by the script."""
        facts = {**call.facts(), **self._facts}
        return facts_for(self._text(path), facts) if facts else None

    def _text(self, path: Path) -> str:
        """Return the text of a script and of its command line, in which a word may set what the files say."""
        text = path.read_text(encoding="utf-8", errors="replace")
        return " ".join([text, *texts(self._words or ())])

    def _trainer(self, file: str, scanned: ScannedTrainer, ignored: Mapping[str, Ignore]) -> Trainer:
        call = scanned.call
        accepted: list[Accepted] = []
        for finding in (*scanned.hits, *scanned.unsure):
            ignore = ignored.get(finding.patch.id)
            if ignore is not None:
                self._ignores.accept(ignore)
                bug = self._bug(finding, call)
                accepted.append(
                    {**bug, "answer": finding.answer.value, "reason": ignore.reason, "accepted_by": ignore.place}
                )
        unsure = [finding for finding in scanned.unsure if finding.patch.id not in ignored]
        return {
            "trainer": f"{call.name}Trainer",
            "called": call.called,
            "line": call.line,
            "position": call.position(call.line),
            "hits": [self._bug(finding, call) for finding in scanned.hits if finding.patch.id not in ignored],
            "cannot_tell": [self._bug(finding, call) for finding in unsure],
            "ask": self._asker.command(file, call.name, unsure),
            "accepted": accepted,
            "rest": scanned.not_hit,
        }

    def _bug(self, finding: Finding, call: TrainerCall) -> Bug:
        return {
            "id": finding.patch.id,
            "title": finding.patch.title,
            "severity": finding.patch.severity.value,
            "harm": finding.patch.harm.value if finding.patch.harm is not None else None,
            "symptom": finding.symptom,
            "lines": list(finding.lines),
            "positions": list(finding.places),
            "because": list(finding.because),
            "unknown": list(finding.unknown),
            "on_by_default": repair_of(finding.patch) == "by default",
            "repair": repair_of(finding.patch),
            "run_repairs": finding.patch.id in self._repaired if self._repaired is not None else None,
            "layer": finding.patch.layer,
            "fixed_in": finding.patch.upstream.fixed_in,
            "fixed_in_layers": fixed_in_layers(finding.patch),
        }
