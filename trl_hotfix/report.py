"""Reports for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import engine, evidence
from .errors import UnknownPatchError
from .model import Evidence, Patch, PatchStatus, Reason, Report, State, Upstream

_COLOURS = {
    State.APPLIED: "green",
    State.PENDING: "green",
    State.FAILED: "bold red",
    State.CONFLICTED: "bold red",
    State.DISPLACED: "bold red",
}
_STYLES = {State.APPLIED: "color: #2e8b57; font-weight: bold", State.PENDING: "color: #2e8b57"}
"""Of HTML: what is on, or will be. Anything else is red if it should be on, and gray if not."""


def explain(patch_id: str) -> str:
    """One patch in words: the bug, the repair, where it stands here and why. Raises ``UnknownPatchError``."""
    report = engine.status()
    try:
        found = report[patch_id]
    except KeyError:
        raise UnknownPatchError([patch_id], [each.id for each in report], "explain()") from None
    patch = found.patch
    fixed_in = f"; fixed upstream in {patch.upstream.fixed_in}" if patch.upstream.fixed_in else ""
    lines = [
        f"{patch.id} (revision {patch.revision}): {patch.title}",
        f"severity   {patch.severity.value}",
        f"TRL        {patch.trl}{fixed_in}",
        *(
            [f"open       in the newest release that was looked at; to be reviewed by {patch.review_by}"]
            if patch.review_by
            else []
        ),
        *(f"requires   {name} {wanted}" for name, wanted in patch.requires.items()),
        f"evidence   {evidence.in_words(patch)}",
        *(f"upstream   {link}" for link in links(patch.upstream)),
        *(f"target     {each.target.module}: {each.target.attribute} ({each.state.value})" for each in found.targets),
        *_options(found),
        f"here       {found.state.value} ({found.reason.value}): {because(found)}",
        f"why        {patch.why}",
        f"how        {patch.how}",
        *(f"turn off   {each}" for each in turn_off(patch)),
        *(f"trail      {line}" for line in engine.ENGINE.journal(patch_id)),
    ]
    return "\n".join(lines)


def _options(found: PatchStatus) -> list[str]:
    lines = []
    for name, option in found.patch.options.items():
        lines.append(f"option     {name} = {found.options[name]} (default {option.default})")
        lines += [f"           {name}={choice}: {meaning}" for choice, meaning in option.choices.items()]
    return lines


def turn_off(patch: Patch) -> list[str]:
    """The ways to do without ``patch``."""
    return [
        f"TRL_HOTFIX_SKIP={patch.id}",
        f"trl_hotfix.apply(skip=[{patch.id!r}])",
        f"trl_hotfix.revert({patch.id!r})",
    ]


def links(upstream: Upstream) -> list[str]:
    """The addresses of upstream's issues and pull requests."""

    def urls(kind: str, numbers: int | tuple[int, ...] | None) -> list[str]:
        listed = (numbers,) if isinstance(numbers, int) else numbers or ()
        return [f"https://github.com/huggingface/trl/{kind}/{number}" for number in listed]

    return urls("issues", upstream.issue) + urls("pull", upstream.fix)


def because(found: PatchStatus) -> str:
    """A reason in words, with its evidence."""
    seen: Mapping[str, Any] = found.evidence
    sentences = {
        Reason.SWITCHED_OFF: "trl_hotfix is off in this process",
        Reason.NOT_SELECTED: "not among those asked for",
        Reason.EXCLUDED: "left out on request",
        Reason.DEFAULT_OFF: "off unless it is asked for by name",
        Reason.FIXED_UPSTREAM: "TRL {installed}: fixed upstream in {fixed_in}",
        Reason.NO_TRL: "TRL is not installed here",
        Reason.TRL_VERSION: "TRL {installed} does not have this bug ({range})",
        Reason.REQUIREMENT: "needs {requires}, found {found}",
        Reason.APPLIES: "TRL {installed} has this bug",
        Reason.BODY_DECIDES: "TRL {installed} is no release: the body of the method decides, when it is imported",
        Reason.NOT_IMPORTED: "goes on when its module is imported",
        Reason.PROVEN: "reproduced before, fixed after, in this process",
        Reason.BY_REQUEST: "taken off on request",
    }
    if found.reason in sentences:
        return sentences[found.reason].format_map(seen)
    return _in_words(seen)


def table(report: Report) -> Table:
    """Every patch: what it repairs, and whether it applies here."""
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    # An id is to be copied, and never folded. With `min_width` rich makes the others too wide for the terminal.
    longest = max((len(each.id) for each in report), default=0)
    view.add_column("patch, what it repairs", overflow="fold", width=max(longest, int(0.45 * _width())))
    view.add_column("TRL range, evidence", overflow="fold")
    view.add_column(f"here: TRL {report.trl or 'none'}", overflow="fold")
    for each in report:
        applies = {State.PENDING: "applies", State.APPLIED: "applied"}.get(each.state, "does not apply")
        answer = Text(f"{applies}: {because(each)}", style=_COLOURS.get(each.state, "dim"))
        # Text, not rich's markup: a cell may start with a bracket.
        what = Text.assemble((each.id, "bold"), f"\n{each.patch.severity.value}: {each.patch.title}")
        view.add_row(what, Text(f"{each.patch.trl}\n{evidence.in_words(each.patch)}"), answer)
    return view


def as_html(report: Report) -> str:
    """What Jupyter shows of a report: every patch with its state and the reason, those that should be on first."""

    from html import escape  # a notebook's, and nobody else's

    def cells(*texts: str, tag: str = "td") -> str:
        aligned = f'<{tag} style="text-align: left">'
        return "<tr>" + "".join(f"{aligned}{each}</{tag}>" for each in texts) + "</tr>"

    def state(each: PatchStatus) -> str:
        style = _STYLES.get(each.state, "") or ("color: #c9302c; font-weight: bold" if each.degraded else "color: gray")
        return f'<span style="{style}">{escape(f"{each.state.value} ({each.reason.value})")}</span>'

    rows = [
        cells(escape(each.id), state(each), *map(escape, (because(each), each.patch.title, each.patch.trl)))
        for each in sorted(report, key=lambda each: not each.degraded)
    ]
    head = f"trl_hotfix {report.trl_hotfix}, TRL {report.trl or 'not found'}, digest {report.digest}"
    names = cells("patch", "state", "why", "repairs", "TRL range", tag="th")
    return f"<p>{escape(head)}</p><table><thead>{names}</thead><tbody>{''.join(rows)}</tbody></table>"


def show(view: Any) -> None:
    """Print a rich view: coloured and folded in a terminal, plain and not cut where output is piped."""
    console = Console(emoji=False)
    if console.is_terminal:
        console.print(view)
        return
    console = Console(width=_width(), no_color=True, emoji=False)
    with console.capture() as captured:
        console.print(view)
    # rich fills each line of a table up to the whole width.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _width() -> int:
    """Of what is printed: the terminal's, or so much that little is folded."""
    console = Console()
    return console.width if console.is_terminal else 200


def as_json(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=2)


def _in_words(seen: Evidence) -> str:
    def words(value: Any) -> Iterable[str]:
        if isinstance(value, Mapping):
            return [f"{key} {' '.join(words(each))}" for key, each in value.items() if key != "traceback"]
        return [f"{value:.6g}" if isinstance(value, float) else str(value)]

    return ", ".join(words(seen))
