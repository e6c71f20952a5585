"""The range of each known bug without a repair is that of the code that has it, in every release of TRL.

These bugs have no self-test. What is looked for is the line with the mistake, or the one that mends it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates

from bench.releases import layout

Texts = Callable[[str], str]
"""Return the text of a module by its name, from ``trl/trainer``, or from ``trl/experimental`` where it has moved."""


SIGNS: dict[str, Callable[[Texts], bool]] = {
    "gold-eos-masked-when-pad-is-eos": lambda text: "[new_input_ids == pad_token_id] = -100" in text("gold_trainer"),
    "dpo-evaluate-precomputes-with-trained-policy": lambda text: (
        'eval_dataset = self._precompute_ref_logps(eval_dataset, "eval", batch_size)' in text("dpo_trainer")
        and 'eval_dataset = self._precompute_ref_logps(eval_dataset, "eval", batch_size)' in text("kto_trainer")
        and "and self.state.global_step > 0" not in text("dpo_trainer") + text("kto_trainer")
    ),
}


def texts_of(release: str) -> Texts:
    root = layout.BENCH / "overlay" / release / "trl"

    def text(module: str) -> str:
        name = module.removesuffix("_trainer")
        moved = root / "experimental" / name / f"{module}.py"
        files = (moved, root / "trainer" / f"{module}.py", root / f"{module}.py")
        return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")

    return text


def test_every_known_bug_has_a_sign() -> None:
    assert {bug.id for bug in loading.without_repair()} == SIGNS.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("bug", loading.without_repair(), ids=[bug.id for bug in loading.without_repair()])
def test_the_range_has_the_releases_with_the_sign_and_no_other(bug: object) -> None:
    layout.build_release_overlays(Path(sys.executable))
    known = next(entry for entry in loading.without_repair() if entry is bug)
    with_sign = [release for release in layout.releases() if SIGNS[known.id](texts_of(release))]
    assert with_sign == [release for release in layout.releases() if gates.has_bug(release, known)]
