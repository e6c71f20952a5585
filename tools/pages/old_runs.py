"""Say on a bug's page what it means for a run that has ended, and how to find out whether it was hit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trl_hotfix.model import Bug, Hit, Severity


def section(bug: Bug, as_markdown: Callable[[str], str]) -> Iterator[str]:
    """Yield the blocks of the section. ``as_markdown`` makes Markdown of the plain text of the catalogue."""
    if bug.severity is Severity.DIAGNOSIS:
        return
    yield "## Your old run"
    yield "The bug hit it if its TRL is in the range above, and one of these holds:"
    yield "\n".join(f"- {_way_into(hit, as_markdown)}" for hit in bug.hits)
    yield "```bash\ntrl-hotfix audit output_dir/\n```"
    yield (
        "`audit` reads [what the run left](../audit.md#was-my-old-run-hit): its arguments, its TRL, its repairs. "
        f"{_not_in_the_folder(bug)}"
    ).strip()
    if bug.retrain is not None:
        yield f"**Must I train again?** {as_markdown(bug.retrain)}"


def _not_in_the_folder(bug: Bug) -> str:
    """Return what the arguments of a run do not tell."""
    if all(hit.depends is None for hit in bug.hits):
        return ""
    return "No file may have what stands after *if* above; then the answer is *cannot tell*."


def _way_into(hit: Hit, as_markdown: Callable[[str], str]) -> str:
    """Return one way into the bug: the trainers, the conditions on their arguments, and what else it depends on."""
    trainers = "any trainer" if "*" in hit.trainers else ", ".join(hit.trainers)
    release = f" of TRL `{hit.trl}`" if hit.trl is not None else ""
    conditions = [f"`{name}` {condition_in_words(condition)}" for name, condition in hit.when.items()]
    depends = [as_markdown(f"if {hit.depends}")] if hit.depends is not None else []
    return "; ".join([f"{trainers}{release}", *conditions, *depends])


def condition_in_words(condition: object) -> str:
    """Return a condition on an argument in words that follow its name."""
    if isinstance(condition, (list, tuple)):
        # Without the words that a literal repeats: "is not given, or `dapo`".
        words = [condition_in_words(alternative) for alternative in condition]
        return " or ".join([words[0], *(word.removeprefix("is ") for word in words[1:])])
    if not isinstance(condition, str):
        return f"is `{condition}`"
    if made_by := re.fullmatch(r"(not )?by (.+)", condition):
        verb = "is not made by" if made_by[1] else "is made by"
        return f"{verb} a call with `{made_by[2].strip('*')}` in its name"
    if comparison := re.fullmatch(r"(!=|>=|<=|>|<)(@?)(.+)", condition):
        operators = {"!=": "is another than", ">": "is above", "<": "is below", ">=": "is at least", "<=": "is at most"}
        return f"{operators[comparison[1]]} `{comparison[3]}`"
    words_of = {
        "unset": "is not given",
        "set": "is given",
        "text": "is given as text",
        "object": "is given as an object",
    }
    return words_of.get(condition, f'is `"{condition}"`')
