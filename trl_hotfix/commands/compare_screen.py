"""Show what ``compare`` has found to a reader."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ..errors import plain
from ..reporting.sentences import no_repair, where_fixed
from ..reporting.table import block
from ..scanning.default_changes import Change
from .compare_answer import Answer, TrainerDefaults


def view(answer: Answer) -> Group:
    """Return the answer as text."""
    return Group(*_blocks(answer))


def _blocks(answer: Answer) -> list[RenderableType]:
    first, second = answer["first"], answer["second"]
    of_script = f" that hit {plain(answer['script'])}, or may" if answer["script"] is not None else ""
    titles = {
        f"TRL {second} has repaired{of_script}": answer["repaired"],
        f"TRL {first} and {second} both have{of_script}": answer["stay"],
        f"TRL {second} brings{of_script}": answer["brought"],
    }
    blocks: list[RenderableType] = []
    for title, bugs in titles.items():
        blocks.append(block(f"{title}: {len(bugs) or 'nothing that is known'}", 0, style="bold"))
        for bug in bugs:
            hits = f"{bug['hits']}  " if bug["hits"] is not None else ""
            known = no_repair(where_fixed(bug["fixed_in"], bug["fixed_in_layers"]))
            notes = {"if named": "; the patch is off unless named", "none": f"; {known}"}
            off = notes.get(bug["repair"], "")
            blocks.append(Padding(Text.assemble(hits, (bug["id"], "bold")), (0, 0, 0, 2)))
            blocks.append(block(f"{bug['title']} ({bug['severity']}{off})", 6))
    for trainer in answer["defaults"] or ():
        blocks += _blocks_of_defaults(trainer, second)
    without = sum(bug["repair"] == "none" for bugs in titles.values() for bug in bugs)
    blocks.append(
        Text(f"trl_hotfix repairs them in the release that has them{f', all but {without}' * bool(without)}.")
    )
    return blocks


def _blocks_of_defaults(trainer: TrainerDefaults, second: str) -> list[RenderableType]:
    """Return what changes for one trainer. Arguments that are new and off are many, and share a line."""
    config = f"{trainer['trainer'].removesuffix('Trainer')}Config"
    new = [change["name"] for change in trainer["changes"] if change["change"] == Change.NEW.value]
    shown = [change for change in trainer["changes"] if change["change"] != Change.NEW.value]
    title = f"Defaults of {config} that change for {trainer['trainer']}, {trainer['position']}"
    blocks: list[RenderableType] = [Text(f"{title}: {trainer['unknown'] or len(shown) or 'none'}", style="bold")]
    for change in shown:
        before, after = (change[key] if change[key] is not None else "not there" for key in ("before", "after"))
        notes = {
            Change.MAY_BE_SET.value: f" (unless the script sets it: {change['position']})",
            Change.GONE.value: f" (the script sets it: {change['position']})",
        }
        line = f"{change['name']}: {before} -> {after}{notes.get(change['change'], '')}"
        blocks.append(block(line, 2, hanging=2))
    if new:
        blocks.append(block(f"new in TRL {second}: {', '.join(new)}", 2, style="dim"))
    return blocks
