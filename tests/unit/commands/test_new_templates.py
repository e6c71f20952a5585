"""What ``new`` writes has no placeholder left; ``test_new`` runs the whole command."""

from __future__ import annotations

import ast
import re
from string import Formatter
from typing import Any

import pytest

from trl_hotfix.commands import new, new_templates

TARGETS = (("trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss"), ("trl.trainer.utils", "pad"))
WORDS = {"id": "dpo-made-up-bug", "title": "a title", "severity": "crash", "trl": "==0.11.4"}
PLACEHOLDER = re.compile(r"\{[a-z_]*\}")


def test_every_placeholder_of_the_entry_is_filled() -> None:
    # `{}` is YAML: this bug has no pull request.
    entry = new._entry({**WORDS, "trl": ">=0.11.4"}, None, TARGETS)
    assert PLACEHOLDER.findall(entry) == ["{}"]
    assert PLACEHOLDER.findall(new._entry(WORDS, 12, TARGETS)) == []
    assert entry.count("- {module: ") == len(TARGETS)


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        (new_templates.MODULE, {"title", "upstream", "wrapper", "attribute"}),
        (new_templates.NEXT, {"id", "trl", "module", "proof", "release", "tests"}),
    ],
    ids=["module", "next"],
)
def test_a_template_has_the_placeholders_that_new_fills(template: str, fields: set[str]) -> None:
    assert {field for _, field, _, _ in Formatter().parse(template) if field is not None} == fields


@pytest.mark.parametrize("title", ["A title", 'three """ quotes', "a backslash \\n and {braces}", "word " * 40])
def test_the_module_is_python_with_any_title(title: str) -> None:
    words: dict[str, Any] = {"upstream": "pull request 1", "wrapper": new.WRAPPER, "attribute": "pad"}
    tree = ast.parse(new_templates.MODULE.format(title=new._docstring(title), **words))
    assert " ".join((ast.get_docstring(tree) or "").split()).startswith(" ".join(title.split()))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [new.WRAPPER, "bug_is_gone"]


def test_the_proof_is_written_as_it_is() -> None:
    tree = ast.parse(new_templates.PROOF)
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == ["train", "unaffected"]
    assert PLACEHOLDER.findall(new_templates.PROOF) == []
