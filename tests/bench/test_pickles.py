"""Every patched thing copied, pickled and sent to workers, and the cache of ``datasets``, on real releases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from rich.console import Console

from trl_hotfix.catalogue import loading

import layout
from bench import HERE, Bench

BENCH = Bench(1, True, Console(quiet=True))
Answer = Mapping[str, Any]


def covering() -> list[layout.Place]:
    """A few releases on which every patch applies at least once, and 0.16.1, where pickles.py adds made-up patches."""
    of = {place: {patch.id for patch in loading.load() if place.targets_of(patch)} for place in layout.places()}
    found = [place for place in of if place.release == "0.16.1"]
    left = {patch.id for patch in loading.load()}.difference(*(of[place] for place in found))
    while left:
        best = max(of, key=lambda place: len(of[place] & left))
        found.append(best)
        left -= of[best]
    return found


def run(place: layout.Place, script: str, *arguments: str, overlay: Path | None = None) -> Answer:
    overlays = [str(overlay)] if overlay else []
    answer = BENCH.process(place, [str(HERE / script), "{out}", *arguments], 300, *overlays)
    assert not isinstance(answer, str), answer
    return answer


@pytest.fixture(scope="session")
def pickled(everywhere: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[layout.Place, tuple[Answer, Answer]]:
    """For each release, what was written with all patches on, and what a fresh process made of it."""
    overlay = tmp_path_factory.mktemp("overlay")
    (overlay / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)

    def both(place: layout.Place) -> tuple[Answer, Answer]:
        folder = str(tmp_path_factory.mktemp("pickles"))
        written = run(place, "pickles.py", "write", folder, overlay=overlay)
        return written, run(place, "pickles.py", "read", folder, overlay=overlay)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(PLACES, pool.map(both, PLACES), strict=True))


PLACES = covering()
MADE_UP_CLASS = "trl.models.modeling_base:PreTrainedModelWrapper.from_pretrained"
MADE_UP_TRACED = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"
every_place = pytest.mark.parametrize("place", PLACES, ids=str)


@every_place
def test_what_is_copied_pickled_or_mapped_by_workers_has_its_patches(pickled: Any, place: layout.Place) -> None:
    written, _ = pickled[place]
    patches = {patch.id for patch in loading.load() if place.targets_of(patch)}
    assert patches <= {each[0] for its in written.values() for each in its["expected"]}
    for target, its in written.items():
        assert len(its["came out"]) >= 24, target
        others = {how: what for how, what in its["came out"].items() if what != its["expected"]}
        assert not others, (target, its["expected"])


def by_name_only(target: str, how: str) -> bool:
    """Python itself pickles these as a class or an instance and a name: what that gives is what the process has."""
    if how == "dill: lambda of instance":
        return True
    made_up_class, made_up_traced = target == MADE_UP_CLASS, target == MADE_UP_TRACED
    return (made_up_class and how.startswith("pickle: ")) or (made_up_traced and how == "pickle: bound")


@every_place
def test_a_process_without_patches_puts_on_what_a_pickle_names_with_its_options(
    pickled: Any, place: layout.Place
) -> None:
    written, read = pickled[place]
    assert read.keys() == written.keys()
    for target, its in read.items():
        expected = written[target]["expected"]
        for how, what in its["came out"].items():
            if by_name_only(target, how):
                assert (what, its["on"][how]) == (None, []), (target, how)
            else:
                assert (what, its["on"][how]) == (expected, sorted(each[0] for each in expected)), (target, how)


@every_place
def test_the_hash_of_a_patched_thing_is_the_same_in_both_processes_and_not_that_of_the_unpatched_one(
    pickled: Any, place: layout.Place
) -> None:
    written, read = pickled[place]
    for target, its in read.items():
        assert its["hashes"], target
        for kind, (restored, unpatched) in its["hashes"].items():
            if its["came out"][f"pickle: {kind}"] is not None:
                assert restored == written[target]["hashes"][kind], (target, kind)
            assert unpatched != written[target]["hashes"][kind], (target, kind)


DPO = "trl.trainer.dpo_trainer"
CACHED = {
    "0.16.1": ("dpo", f"{DPO}:DPOTrainer.tokenize_row", "trl.data_utils:is_conversational"),
    "1.7.1": ("dpo", f"{DPO}:DPOTrainer._tokenize"),
    "1.16.0": ("sft", "trl.data_utils:_tokenize"),
}


@pytest.fixture(scope="session")
def cached(everywhere: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Answer, Answer]]:
    """For each release, two processes one after the other over the same dataset on disk."""

    def twice(release: str) -> tuple[Answer, Answer]:
        folder = str(tmp_path_factory.mktemp("cache"))
        place = next(place for place in layout.places([release]) if place.stack != "tf5.23")
        first, second = (run(place, "caches.py", folder, *CACHED[release]) for _ in range(2))
        return first, second

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(CACHED, pool.map(twice, CACHED), strict=True))


@pytest.mark.parametrize("release", CACHED)
def test_the_cache_from_before_a_data_patch_is_not_reused_and_that_of_an_unaffected_step_is(
    cached: Any, release: str
) -> None:
    first, _ = cached[release]
    unpatched, patched = first["unpatched"], first["data patch"]
    assert unpatched["made"]
    assert (unpatched["marked"], patched["marked"]) == (0, patched["rows"])
    assert patched["made"]
    # The steps before the patched one are taken from the cache.
    assert len(patched["made"]) < len(unpatched["made"])
    workers = first["data patch, two workers"]
    assert workers["marked"] == workers["rows"]
    assert any(name.endswith("_of_00002.arrow") for name in workers["made"])


@pytest.mark.parametrize("release", CACHED)
def test_the_patches_that_change_no_data_leave_the_cache_as_it_is(cached: Any, release: str) -> None:
    first, _ = cached[release]
    assert first["all others of the catalogue"]["made"] == []


@pytest.mark.parametrize("release", CACHED)
def test_another_process_takes_all_of_it_from_the_cache(cached: Any, release: str) -> None:
    _, second = cached[release]
    assert not [made for case in second.values() for made in case["made"]]
    assert second["data patch"]["marked"] == second["data patch"]["rows"]


def test_a_function_that_a_mapped_function_of_a_module_calls_is_not_in_its_hash(cached: Any) -> None:
    # Not promised: such a function is hashed by its name, patched or not, and the cache from before is taken.
    first, _ = cached["0.16.1"]
    assert first["a function that it calls"]["made"] == []
