"""Ask the trainers of every release all claims, and count what came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trl_hotfix.matching.versions import in_range
from trl_hotfix.relations import ledger
from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED, Cell
from trl_hotfix.relations.claims import Claim
from trl_hotfix.relations.ledger import Finding
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.stand_ins import LIGER
from trl_hotfix.relations.trainers import RECIPES

from bench.options import jobs_option, names_of, releases_option, shard_option
from bench.proving import running
from bench.relations import record
from bench.relations.inside import ABSENT
from bench.relations.known import Answer, find, keep, key
from bench.relations.ledger import not_seen, without_cause
from bench.releases import layout
from bench.releases.layout import BENCH, Place
from bench.shards import Shard

SECONDS_A_CLAIM = 60
Named = tuple[str, Claim]
"""A claim with the name of its relation."""


Name = tuple[str, bool, str, str, str]
"""A place, whether the patches are on, a trainer, a relation and a claim."""


@dataclass(frozen=True)
class Work:
    """One trainer in one place, with the patches or without, and the claims that it is asked.

    ``overlays`` are packages that the claims need. The runs of other claims do not see them.
    """

    place: Place
    trainer: str
    on: bool
    claims: tuple[Named, ...]
    overlays: tuple[str, ...] = ()

    def name(self, claim: Named) -> Name:
        return str(self.place), self.on, self.trainer, claim[0], str(claim[1])

    def known(self, claim: Named) -> Answer | None:
        return find(self._key(claim), self.place, on=self.on)

    def keep(self, claim: Named, found: Answer) -> Answer:
        return keep(self._key(claim), self.place, found, on=self.on)

    def _key(self, claim: Named) -> str:
        return key(RECIPES[self.trainer], *claim, self.place, on=self.on, overlays=self.overlays)


def claims_of(trainer: str, relations: Iterable[str]) -> tuple[Named, ...]:
    """Return all claims about a trainer, also those about an option that some releases lack."""
    return tuple((name, claim) for name in relations for claim in RELATIONS[name].claims(RECIPES[trainer]))


def chosen(part: Shard, place: Place, trainer: str, relations: Iterable[str]) -> list[str]:
    """Return the relations of a trainer in a place that are in a part. All claims of a relation are in the same one."""
    return [relation for relation in relations if part.has(f"{place.release} {trainer} {relation}")]


def works_of(place: Place, trainer: str, claims: Sequence[Named], *, on: bool) -> Iterator[Work]:
    """Give the work of a trainer in a place: one for all claims that need the same packages."""
    by_need: dict[tuple[str, ...], list[Named]] = {}
    for claim in claims:
        by_need.setdefault(overlays_of(claim[1], place), []).append(claim)
    for overlays, needing in by_need.items():
        yield Work(place, trainer, on, tuple(needing), overlays)


def overlays_of(claim: Claim, place: Place) -> tuple[str, ...]:
    """Return the packages beside a stack that the runs of a claim need."""
    zero = any(setting.engine.startswith("zero") for setting in claim.settings)
    # Until 4.47 transformers lets no DeepSpeed from 0.16 on sum up gradients.
    is_early = in_range(place.version_of("transformers") or "", "<4.48")
    liger = any(setting.arguments.get(name) for setting in claim.settings for name in LIGER)
    deepspeed = "deepspeed-0.15.4" if is_early else "deepspeed"
    needed = {deepspeed: zero, "liger": liger, "images": any(setting.images for setting in claim.settings)}
    return tuple(name for name, is_needed in needed.items() if is_needed)


def ask(works: Sequence[Work], jobs: int, console: Console) -> list[dict[str, Any]]:
    """Return an answer for each claim of each work, from what is known or by a run."""
    answers = {work.name(claim): found for work in works for claim in work.claims if (found := work.known(claim))}
    unknown = []
    for work in works:
        claims = tuple(claim for claim in work.claims if work.name(claim) not in answers)
        if claims:
            unknown.append(replace(work, claims=claims))
    if unknown:
        beside = {overlay for work in unknown for overlay in work.overlays}
        layout.build({work.place for work in unknown}, console.print, beside=beside)
    # The longest first, so that none is alone at the end.
    unknown.sort(key=lambda work: -len(work.claims))
    answers |= running.in_parallel("trainers, by release", unknown, _run, jobs, console)
    return [
        {"place": str(work.place), "on": work.on, **{each: found[each] for each in ("cell", "seconds", "ran")}}
        for work in works
        for claim in work.claims
        if (found := answers[work.name(claim)])["cell"]["state"] != ABSENT
    ]


def _run(work: Work) -> list[tuple[Name, Answer]]:
    """Run what is asked, and keep the answers, of an interrupted run too.

    A claim without one, since the process failed, has an error.
    """
    by_name = {(relation, str(claim)): (relation, claim) for relation, claim in work.claims}
    task = {"trainer": work.trainer, "on": work.on, "claims": list(by_name)}
    seconds = 60 + SECONDS_A_CLAIM * len(work.claims)
    log = "-".join(("relations", str(work.place), work.trainer, "on" if work.on else "off", *work.overlays))
    found, why = running.lines_of(work.place, "bench.relations.inside", task, seconds, log, work.overlays)
    answers = []
    for answer in found:
        claim = by_name.pop((answer["cell"]["relation"], answer["cell"]["setting"]))
        answers.append((work.name(claim), work.keep(claim, answer)))
    for (relation, setting), claim in by_name.items():
        cell = Cell(work.trainer, relation, setting, ERROR, why).as_data()
        answers.append((work.name(claim), {"cell": cell, "seconds": 0.0, "ran": str(work.place)}))
    return answers


def counted(answers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each place, on and off, and one for each trainer in it."""
    lines = []
    for where in dict.fromkeys((answer["place"], answer["on"]) for answer in answers):
        here = [answer for answer in answers if (answer["place"], answer["on"]) == where]
        lines.append(_line(f"{where[0]}, patches {'on' if where[1] else 'off'}", here))
        for trainer in dict.fromkeys(answer["cell"]["trainer"] for answer in here):
            lines.append(_line(f"  {trainer}", [answer for answer in here if answer["cell"]["trainer"] == trainer]))
    return lines


def _line(name: str, answers: Sequence[dict[str, Any]]) -> str:
    states = Counter(answer["cell"]["state"] for answer in answers)
    counts = "".join(f"{states[state]:6d} {state}" for state in (HOLDS, VIOLATED, UNASKED, ERROR))
    own = [answer for answer in answers if answer["ran"] == answer["place"]]
    seconds = sum(answer["seconds"] for answer in own)
    return f"{name:34s}{len(answers):6d} claims{counts}{seconds:8.0f} s, {len(answers) - len(own)} by other places"


trainers_option = click.option("--trainers", callback=names_of(RECIPES), help="Separated by commas; default: all.")


@click.command()
@releases_option
@trainers_option
@click.option("--relations", callback=names_of(RELATIONS), help="Separated by commas; default: all.")
@click.option("--off", "only_off", is_flag=True, help="Only without the patches.")
@click.option("--on", "only_on", is_flag=True, help="Only with the patches.")
@shard_option
@click.option("--recorded", is_flag=True, help="Only what evidence/relations has: releases, trainers and ways.")
@jobs_option
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), default=BENCH.parent / "build/relations.json")
@click.option("--write", "writes", is_flag=True, help="Write the answers into evidence/relations, too.")
def command(
    places: tuple[Place, ...],
    trainers: tuple[str, ...],
    relations: tuple[str, ...],
    only_off: bool,
    only_on: bool,
    shard: Shard,
    recorded: bool,
    jobs: int,
    into: Path,
    writes: bool,
) -> None:
    """Ask TRL's trainers of these releases, each on its main stack.

    Exit code 1 if a run failed, a violation has no cause in the ledger, or a finding of the ledger is not seen.
    """
    ways = [on for on in (False, True) if not (only_off and on) and not (only_on and not on)]
    known = record.subjects() if recorded else None
    works = [
        work
        for place in places
        if place.is_main
        for trainer in trainers
        for on in ways
        if known is None or (str(place), on, trainer) in known
        for work in works_of(place, trainer, claims_of(trainer, chosen(shard, place, trainer, relations)), on=on)
    ]
    console = Console()
    answers = ask(works, jobs, console)
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    for line in [*counted(answers), *_recorded(answers, writes=writes)]:
        click.echo(line)
    problems = list(_problems(answers, ledger.load()))
    click.echo("\n".join(problems))
    if problems:
        raise SystemExit(1)


def _recorded(answers: Sequence[dict[str, Any]], *, writes: bool) -> Iterator[str]:
    """Write the answers down, or say which record has others."""
    for path, text in record.texts(answers, record.FOLDER).items():
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif path.is_file() and path.read_text(encoding="utf-8") != text:
            yield f"{path} has other answers: --write replaces them"


def _problems(answers: Sequence[dict[str, Any]], findings: Sequence[Finding]) -> Iterator[str]:
    """Give what is to be looked at."""
    yield from (f"no cause: {violation}" for violation in without_cause(answers, findings))
    for where, finding in not_seen(answers, findings):
        yield f"not seen: {where}: {finding.relation} of {', '.join(finding.trainers)}, {finding.cause}"
