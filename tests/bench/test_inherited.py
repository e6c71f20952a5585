"""What a patch is on may be inherited from transformers: its bodies between the stacks are run, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import inherited
from trl_hotfix.model import Target

from bench.releases import layout
from bench.results import evidence, keys
from tools import transformers_record

STEP = "trl.trainer.dpo_trainer:DPOTrainer.training_step"
OF = "transformers:Trainer.training_step"
MOE = next(patch for patch in loading.load() if patch.id == "moe-aux-loss-lost-under-deepspeed")
PATCH = replace(
    MOE,
    trl=">=0.12.0,<0.18",
    requires={"transformers": ">=4.46,<4.48"},
    targets=tuple(
        Target("trl.trainer.dpo_trainer", f"DPOTrainer.{name}", MOE.targets[0].wrapper)
        for name in ("training_step", "get_batch_samples")
    ),
)
BETWEEN = layout.Place("0.17.0", "tf4.51", "4.47.1")


@pytest.fixture(autouse=True)
def wheels_of_all_releases(sources: None) -> None:
    """Lay out the code of every release."""


def test_a_release_inherits_a_method_until_trl_defines_it() -> None:
    module, _, attribute = STEP.partition(":")
    target = Target(module, attribute, "wrapper")
    assert [evidence.inherits(release, target) for release in ("0.11.4", "0.28.0", "0.29.0")] == [OF, OF, None]
    assert [evidence.body(release, target) is None for release in ("0.11.4", "0.28.0", "0.29.0")] == [True, True, False]
    assert evidence.inherits("0.28.0", replace(target, attribute="DPOTrainer.gone")) is None


def test_each_body_between_the_stacks_is_run_beneath_the_nearest_release_of_trl() -> None:
    assert list(map(str, evidence.beneath_of(PATCH))) == [
        "0.17.0@tf4.46+transformers-4.46.1",
        "0.17.0@tf4.51+transformers-4.47.0",
        str(BETWEEN),
    ]
    assert evidence.beneath_of(replace(PATCH, requires={"transformers": ">=4.46.2,<4.47"})) == []
    # The range begins with a release that no stack has with this transformers.
    older = replace(PATCH, trl=">=0.11.4,<0.18", requires={"transformers": ">=4.46.2,<4.47"})
    assert list(map(str, evidence.beneath_of(older))) == ["0.11.4@tf4.46+transformers-4.46.3"]
    assert evidence.beneath_of(replace(PATCH, requires={})) == []


def test_a_place_has_the_transformers_in_front_of_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = layout.Place(BETWEEN.release, BETWEEN.stack)
    assert (BETWEEN.version_of("transformers"), BETWEEN.version_of("torch")) == ("4.47.1", place.version_of("torch"))
    monkeypatch.setattr(layout, "BENCH", tmp_path)
    Path(tmp_path, "overlay", BETWEEN.release).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"is not laid out: .*/transformers-4\.47\.1 is missing"):
        BETWEEN.environment()
    Path(tmp_path, "overlay", "transformers-4.47.1").mkdir()
    assert "/overlay/transformers-4.47.1:" in BETWEEN.environment()["PYTHONPATH"]
    assert (bool(BETWEEN.targets_of(PATCH)), bool(place.targets_of(PATCH))) == (True, False)
    assert keys.cell_key(PATCH, BETWEEN) != keys.cell_key(PATCH, place)


def test_the_verdict_on_a_body_between_the_stacks_is_recorded(tmp_path: Path) -> None:
    body = str(inherited.body_of(OF, "4.47.0"))
    place = layout.Place("0.17.0", "tf4.51", "4.47.0")
    red = {"trl.trainer.dpo_trainer": {"red": {"verdict": "reproduced"}}}
    shared = {"patch": PATCH.id, "ran": "0.17.0", "verdict": "proven", "why": "", "key": "0", "leaves": red}
    main = {"release": "0.17.0", "stack": "tf4.46", "bodies": {STEP: inherited.body_of(OF, "4.46.3")}}
    between = {"release": "0.17.0", "stack": place.stack, "transformers": "4.47.0", "bodies": {STEP: body}}
    evidence.write(PATCH, [{**shared, **main}], folder=tmp_path, beneath=[{**shared, **between}])
    record = evidence.load(PATCH.id, tmp_path)
    assert list(map(evidence.place_of, record["beneath"])) == [place]
    assert record["inherited"][STEP]["of"] == OF
    assert record["inherited"][STEP]["is"] == {main["bodies"][STEP]: "buggy", body: "buggy"}  # type: ignore[index]
    before = (tmp_path / f"{PATCH.id}.json").read_text()
    evidence.write(PATCH, folder=tmp_path)
    assert (tmp_path / f"{PATCH.id}.json").read_text() == before


def test_the_record_of_transformers_is_that_of_the_stacks_that_are_laid_out() -> None:
    recorded = inherited.by_release(inherited._record())
    of_stacks = transformers_record.of_stacks()
    assert of_stacks
    assert {release: recorded.get(release) for release in of_stacks} == of_stacks


@pytest.mark.parametrize("patch", loading.load(), ids=lambda patch: patch.id)
def test_every_body_that_a_patch_can_meet_in_transformers_is_on_record(patch: evidence.Patch) -> None:
    recorded = {evidence.place_of(cell): cell for cell in evidence.load(patch.id)["beneath"]}
    assert {*recorded} == {*evidence.beneath_of(patch)}, f"run `python -m bench run --patches {patch.id}`"
    for place, cell in recorded.items():
        assert (cell["verdict"], cell["key"]) == ("proven", keys.cell_key(patch, place)), (place, cell["why"])
