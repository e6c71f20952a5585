"""A valid entry of patches.yaml, to be changed into invalid ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from trl_hotfix.catalogue import loading, parsing
from trl_hotfix.errors import CatalogueError

SHIPPED = loading.load()


# The catalogue looks for the id and the functions in the module of the patch, so they are those of a shipped one.
EXAMPLE = SHIPPED[0]
ENTRY = f"""\
- id: {EXAMPLE.id}
  revision: 1
  title: A title
  severity: crash
  trl: ">=0.11.0,<0.12.0"
  upstream: {{issue: 1, fix: [2, 3], fixed_in: "0.12.0"}}
  why: because
  how: so
  targets:
    - module: trl.trainer.dpo_trainer
      attribute: DPOTrainer.get_batch_loss_metrics
      wrapper: {EXAMPLE.targets[0].wrapper}
  self_test: {EXAMPLE.self_test}
"""


def with_lines(changes: Mapping[int, str | None]) -> str:
    """Return the example entry with lines replaced, or left out where the new line is None."""
    lines = [changes.get(number, line) for number, line in enumerate(ENTRY.splitlines(), start=1)]
    return "".join(f"{line}\n" for line in lines if line is not None)


def mistakes(text: str) -> list[tuple[int, str]]:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse(text, "patches.yaml")
    return [(mistake.line, mistake.message) for mistake in caught.value.mistakes]


def the_mistake(text: str) -> tuple[int, str]:
    refused = mistakes(text)
    assert len(refused) == 1, refused
    return refused[0]


OPTIONS = """\
  options:
    over:
      choices: {sequence: as in the paper, global: every token}
      default: sequence
"""
WITH_OPTION = next(patch for patch in SHIPPED if patch.options)


def with_options(options: str) -> str:
    entry = ENTRY.replace(EXAMPLE.id, WITH_OPTION.id).replace(EXAMPLE.self_test, WITH_OPTION.self_test)
    return entry.replace(EXAMPLE.targets[0].wrapper, WITH_OPTION.targets[0].wrapper) + options
