"""A team rolls out: observe changes nothing, `1` repairs, strict ends the runs that train wrongly and no others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

SMOOTHING, TWICE, TIMES = (
    "sft-label-smoothing-times-gas",
    "transformers-divides-gradients-twice",
    "transformers-gradients-times-gas",
)
WITH, WITHOUT = {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1}
SMOOTH = {**WITH, "label_smoothing_factor": 0.2}
DAPO = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
FREE = {"padding_free": True, "rpo_alpha": 1.0}

# The place, the trainer and the patch; settings that hit its bug, and settings that do not.
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"0.16.1@tf4.46 SFT {SMOOTHING}": (SMOOTH, WITH),
    f"0.16.1@tf4.46 DPO {TIMES}": (WITH, WITHOUT),
    f"0.16.1@tf4.46 GRPO {TIMES}": (WITH, WITHOUT),
    f"0.24.0@tf4.57 SFT {SMOOTHING}": (SMOOTH, WITH),
    "0.24.0@tf4.57 DPO dpo-padding-free-wrong-terms": (FREE, {"padding_free": False, "rpo_alpha": 1.0}),
    "0.24.0@tf4.57 GRPO grpo-dapo-normaliser": ({**DAPO, "loss_type": "dapo"}, {**DAPO, "loss_type": "grpo"}),
    f"1.16.0@tf5.2 SFT {TWICE}": (WITH, WITHOUT),
    f"1.16.0@tf5.2 DPO {TWICE}": (WITH, WITHOUT),
    f"1.16.0@tf5.2 GRPO {TWICE}": (WITH, WITHOUT),
}
MODES = ("0", "observe", "1", "strict", "1 wrapped", "strict wrapped", "strict-all wrapped")
Answers = Mapping[str, Any]


def named(trainer: str, patch: str, settings: Mapping[str, Any], mode: str) -> str:
    return f"{trainer} {patch} {json.dumps(settings, separators=(',', ':'))} {mode}"


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[str, Answers]:
    """Return the answers of each place, by case."""
    selected = {one["cell"] for one in sharing.parameters(request)}
    cases: dict[str, list[str]] = {}
    for cell in selected:
        place, trainer, patch = cell.split(" ")
        both = CELLS[cell]
        cases.setdefault(place, []).extend(named(trainer, patch, one, mode) for one in both for mode in MODES)
    places = {str(place): place for place in layout.places() if str(place) in cases}
    layout.build(places.values())

    def run(name: Any) -> Any:
        return process(places[name], ["-m", "bench.inside.rollout", "{out}", *cases[name]], 900)

    return sharing.side_by_side(run, cases)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("hits", [True, False], ids=["hits", "does not hit"])
@pytest.mark.parametrize("cell", sharing.heavy(CELLS, smoke=[f"0.16.1@tf4.46 SFT {SMOOTHING}"]))
def test_strict_ends_what_trains_wrongly_and_nothing_else(
    answers: Mapping[str, Answers], cell: str, hits: bool
) -> None:
    place, trainer, patch = cell.split(" ")
    settings = CELLS[cell][0 if hits else 1]
    by_mode = {mode: sharing.answer_of(answers, place, named(trainer, patch, settings, mode)) for mode in MODES}
    gradients = {mode: answer["gradients"] for mode, answer in by_mode.items()}
    off = gradients["0"]
    assert len(off) == 2
    assert gradients["observe"] == off
    assert (gradients["1"] != off) is hits
    assert gradients["strict"] == gradients["1"]
    # Where the patch does not go on, the run trains as without us, and says so.
    assert gradients["1 wrapped"] == off
    assert by_mode["1 wrapped"]["warnings"]
    assert [mode for mode, answer in by_mode.items() if answer["error"]] == [
        *(["strict wrapped"] if hits else []),
        "strict-all wrapped",
    ]
    wrapped = by_mode["strict wrapped"]
    assert wrapped["gradients"] == ([] if hits else off)
    assert wrapped["warnings"]
    if hits:
        assert f"{patch}: conflicted (foreign-wrapper)" in wrapped["error"]
        assert wrapped["error"].endswith(f"To go on without: TRL_HOTFIX_SKIP={patch}")
