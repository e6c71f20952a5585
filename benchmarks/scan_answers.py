"""How much the scan tells, and how often it is wrong: beside astroid's inference, on scripts whose truth a run tells.

    python -m benchmarks.scan_answers [--scripts 2000] [RELEASE=FOLDER...]

The scripts are those of ``tests/helpers/generated_scripts.py``, from a fixed seed. Each is run with a trainer that
records what it is given. An answer is right, wrong, or unknown. astroid knows modules, names and classes, and not what
a call of a dataclass makes of its arguments; so the config's call is read in the same way for both, and astroid infers
the values. Its answer counts as unknown where it infers several values, or none. astroid is no dependency of ours:
``pip install astroid==4.3.4``.

In each FOLDER, such as the examples of that release of TRL, the answers of ``scan --trl RELEASE`` are counted.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from hypothesis import HealthCheck, Phase, given, seed, settings

CHECKOUT = Path(__file__).resolve().parents[1]

from trl_hotfix.catalogue.conditions import Argument, Kind  # noqa: E402
from trl_hotfix.scanning.bindings import ScriptBindings  # noqa: E402
from trl_hotfix.scanning.trainer_calls import trainer_calls  # noqa: E402

from helpers import generated_scripts  # noqa: E402

Lookup = Callable[[str], Argument]
STAND_IN = """
class DPOConfig:
    def __init__(self, beta=None, padding_free=None, loss_type=None, model_init_kwargs=None): pass
class DPOTrainer:
    def __init__(self, model=None, ref_model=None, args=None, peft_config=None, callbacks=None): pass
    def train(self, resume_from_checkpoint=None): pass
class BEMACallback: pass
class LoraConfig:
    def __init__(self, rank=None): pass
"""
UNKNOWN, UNSET = Argument(Kind.UNKNOWN), Argument(Kind.UNSET)


def by_our_scan(text: str) -> dict[int, Lookup]:
    return {call.line: call.argument for call in trainer_calls(ScriptBindings(ast.parse(text))).calls}


def by_astroid(text: str) -> dict[int, Lookup]:
    """Return the trainers of a script by their lines, as astroid infers their classes and their arguments."""
    import astroid

    for name in ("trl", "peft"):
        astroid.astroid_manager.MANAGER.astroid_cache.pop(name, None)
        astroid.parse(STAND_IN, module_name=name)
        astroid.astroid_manager.MANAGER.astroid_cache[name] = astroid.parse(STAND_IN, module_name=name)
    calls = astroid.parse(text).nodes_of_class(astroid.nodes.Call)
    return {call.lineno: _astroid_lookup(call) for call in calls if _is_a(call.func, "DPOTrainer")}


def _is_a(function: Any, name: str) -> bool:
    cls = _inferred(function)
    ancestors = getattr(cls, "ancestors", None)
    if ancestors is None or not hasattr(cls, "mro"):
        return False
    return name in (cls.name, *(ancestor.name for ancestor in ancestors()))


def _inferred(node: Any) -> Any:
    """Return the one value that astroid infers, or None."""
    import astroid

    try:
        values = list(node.infer())
    except (astroid.InferenceError, RecursionError):
        return None
    return values[0] if len(values) == 1 and values[0] is not astroid.Uninferable else None


def _astroid_lookup(call: Any) -> Lookup:
    given = _keywords(call)

    def lookup(name: str) -> Argument:
        if given is None:
            return UNKNOWN
        if name in generated_scripts.TRAINER_ARGUMENTS:
            return _argument(given[name]) if name in given else UNSET
        if "args" not in given:
            return UNSET
        config = _made_by(given["args"])
        options = _keywords(config) if config is not None and _is_a(config.func, "DPOConfig") else None
        instance = _inferred(given["args"])
        if options is None or instance is None:
            return UNKNOWN
        # What astroid has seen set on the object, at any line.
        if name in getattr(instance, "instance_attrs", ()):
            return UNKNOWN
        return _argument(options[name]) if name in options else UNSET

    return lookup


def _keywords(call: Any) -> dict[str, Any] | None:
    """Return the arguments of a call by name, or None if it unpacks any that astroid does not infer."""
    import astroid

    if any(isinstance(argument, astroid.nodes.Starred) for argument in call.args):
        return None
    arguments: dict[str, Any] = dict(zip(("model", "ref_model", "args"), call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is not None:
            arguments[keyword.arg] = keyword.value
            continue
        options = _inferred(keyword.value)
        if not isinstance(options, astroid.nodes.Dict):
            return None
        arguments |= {key.value: value for key, value in options.items if isinstance(key, astroid.nodes.Const)}
    return arguments


def _made_by(node: Any) -> Any:
    """Return the one call that a name has been assigned, as astroid looks names up by the flow of the script."""
    import astroid

    for _ in range(10):
        if isinstance(node, astroid.nodes.Call):
            return node
        if not isinstance(node, astroid.nodes.Name):
            return None
        _, statements = node.lookup(node.name)
        if len(statements) != 1 or not isinstance(statements[0].parent, astroid.nodes.Assign):
            return None
        node = statements[0].parent.value
    return None


def _argument(node: Any) -> Argument:
    import astroid

    value = _inferred(node)
    if isinstance(value, astroid.nodes.Const):
        return UNSET if value.value is None else Argument(Kind.LITERAL, value.value)
    if isinstance(value, astroid.nodes.List) and all(isinstance(item, astroid.nodes.Const) for item in value.elts):
        return Argument(Kind.LITERAL, [item.value for item in value.elts])
    name = getattr(value, "pytype", str)() if value is not None else ""
    return Argument(Kind.OBJECT, made_by=(name.rpartition(".")[2],)) if name else UNKNOWN


def judged(lookups: dict[int, Lookup], recorded: list[generated_scripts.Recorded]) -> Iterator[str]:
    """Yield right, wrong or unknown for each argument of each trainer that the run has made."""
    for trainer in recorded:
        for name in generated_scripts.ARGUMENTS:
            argument = lookups[trainer.line](name) if trainer.line in lookups else UNKNOWN
            if argument.kind is Kind.UNKNOWN:
                yield "unknown"
            else:
                yield "right" if generated_scripts.is_true_of(argument, trainer, name) else "wrong"


def answers_on_generated_scripts(number: int) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {"scan": Counter(), "astroid": Counter()}

    @seed(0)
    @given(generated_scripts.scripts())
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def count(text: str) -> None:
        recorded = generated_scripts.run(text)
        counts["scan"].update(judged(by_our_scan(text), recorded))
        counts["astroid"].update(judged(by_astroid(text), recorded))

    count()
    return counts


def answers_in(release: str, folder: str) -> Counter[str]:
    """Count the answers of ``scan`` on a folder, for a release of TRL."""
    options = ["--format", "json", "--fail-on", "never", "--trl", release]
    command = [sys.executable, "-m", "trl_hotfix", "scan", *options, folder]
    process = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    counts: Counter[str] = Counter()
    for file in json.loads(process.stdout)["files"]:
        for trainer in file["trainers"]:
            counts["hit"] += len(trainer["hits"])
            counts["cannot tell"] += len(trainer["cannot_tell"])
            counts["does not hit"] += trainer["rest"]
    return counts


@click.command()
@click.option("--scripts", type=click.IntRange(min=1), default=2000, show_default=True)
@click.argument("folders", nargs=-1)
def main(scripts: int, folders: tuple[str, ...]) -> None:
    """Count the answers of the scan, and those of astroid, on generated scripts; and those on folders."""
    for name, counts in answers_on_generated_scripts(scripts).items():
        total = counts.total()
        shares = ", ".join(
            f"{what} {counts[what]} ({counts[what] / total:.1%})" for what in ("right", "wrong", "unknown")
        )
        click.echo(f"{name}: of {total} arguments {shares}")
    for folder in folders:
        click.echo(f"{folder}: {dict(answers_in(*folder.split('=', 1)))}")


if __name__ == "__main__":
    main()
