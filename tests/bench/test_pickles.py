"""References to patched functions in copies, pickles and workers, and the ``datasets`` cache, on real releases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from trl_hotfix.catalogue import loading

from bench.proving import covering
from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

SECONDS = 900
"""Some take three minutes on a machine that does nothing else."""

Answer = Mapping[str, Any]


def run(place: layout.Place, module: str, *arguments: str, overlay: Path | None = None) -> Answer:
    overlays = [str(overlay)] if overlay else []
    answer = process(place, ["-m", f"bench.inside.{module}", "{out}", *arguments], SECONDS, *overlays)
    assert not isinstance(answer, str), answer
    return answer


@pytest.fixture(scope="module")
def pickled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[layout.Place, tuple[Answer, Answer]]:
    """Return per release the answers of a process with all patches on, and of a fresh one that loads its pickles."""
    places = {case["place"]: None for case in sharing.parameters(request)}
    layout.build(places)
    overlay = tmp_path_factory.mktemp("overlay")
    (overlay / "cloudpickle").symlink_to(Path(cloudpickle.__file__).parent)

    def write_and_read(place: layout.Place) -> tuple[Answer, Answer]:
        folder = str(tmp_path_factory.mktemp("pickles"))
        written = run(place, "pickles", "write", folder, overlay=overlay)
        return written, run(place, "pickles", "read", folder, overlay=overlay)

    return sharing.side_by_side(write_and_read, places)


PLACES = list(covering.of_pickles())
MADE_UP_CLASS = "trl.models.modeling_base:PreTrainedModelWrapper.from_pretrained"
every_place = pytest.mark.parametrize("place", sharing.heavy(PLACES), ids=str)


@every_place
def test_copies_pickles_and_workers_keep_the_patches(pickled: Any, place: layout.Place) -> None:
    written, _ = pickled[place]
    patches = {patch.id for patch in loading.load() if place.targets_beside(patch)}
    assert patches <= {expected[0] for answer in written.values() for expected in answer["expected"]}
    for target, answer in written.items():
        assert len(answer["came out"]) >= 24, target
        differing = {
            case: patches_found
            for case, patches_found in answer["came out"].items()
            if patches_found != answer["expected"]
        }
        assert not differing, (target, answer["expected"])


def by_name_only(target: str, case: str, *, is_static: bool) -> bool:
    """Python pickles these as a class or instance and a name, so loading them returns what the process has there."""
    if case == "dill: lambda of instance":
        return True
    # A bound static method is a function, which has a name of ours.
    return (case == "pickle: bound" and not is_static) or (target == MADE_UP_CLASS and case.startswith("pickle: "))


@every_place
def test_an_unpatched_process_applies_what_a_pickle_names(pickled: Any, place: layout.Place) -> None:
    written, read = pickled[place]
    assert read.keys() == written.keys()
    for target, answer in read.items():
        expected = written[target]["expected"]
        for case, patches in answer["came out"].items():
            if by_name_only(target, case, is_static=written[target]["static"]):
                assert (patches, answer["on"][case]) == (None, []), (target, case)
            else:
                ids = sorted(patch[0] for patch in expected)
                assert (patches, answer["on"][case]) == (expected, ids), (target, case)


@every_place
def test_patched_hashes_agree_and_differ_from_unpatched(pickled: Any, place: layout.Place) -> None:
    written, read = pickled[place]
    for target, answer in read.items():
        assert answer["hashes"].keys() == written[target]["hashes"].keys(), target
        for kind, (restored, unpatched) in answer["hashes"].items():
            assert restored == written[target]["hashes"][kind], (target, kind)
            assert unpatched != written[target]["hashes"][kind], (target, kind)


DPO = "trl.trainer.dpo_trainer"
CACHED = {
    "0.16.1": ("dpo", f"{DPO}:DPOTrainer.tokenize_row", "trl.data_utils:is_conversational"),
    "1.7.1": ("dpo", f"{DPO}:DPOTrainer._tokenize"),
    "1.16.0": ("sft", "trl.data_utils:_tokenize"),
}


@pytest.fixture(scope="module")
def cached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, tuple[Answer, Answer]]:
    """Return for each release the answers of two successive processes on the same dataset on disk."""
    releases = {case["release"]: None for case in sharing.parameters(request)}
    places = {release: layout.main_place(release) for release in releases}
    layout.build(places.values())

    def twice(release: str) -> tuple[Answer, Answer]:
        folder = str(tmp_path_factory.mktemp("cache"))
        first, second = (run(places[release], "caches", folder, *CACHED[release]) for _ in range(2))
        return first, second

    return sharing.side_by_side(twice, releases)


every_cached_release = pytest.mark.parametrize("release", sharing.heavy(CACHED))


@every_cached_release
def test_a_data_patch_reuses_only_unaffected_cache_files(cached: Any, release: str) -> None:
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


@every_cached_release
def test_patches_that_change_no_data_reuse_the_cache(cached: Any, release: str) -> None:
    first, _ = cached[release]
    assert first["all others of the catalogue"]["made"] == []


@every_cached_release
def test_a_second_process_reuses_the_whole_cache(cached: Any, release: str) -> None:
    _, second = cached[release]
    assert not [file for case in second.values() for file in case["made"]]
    assert second["data patch"]["marked"] == second["data patch"]["rows"]


@pytest.mark.parametrize("release", sharing.heavy(release for release, targets in CACHED.items() if len(targets) > 2))
def test_a_called_function_is_not_in_the_hash_of_its_caller(cached: Any, release: str) -> None:
    # Not promised: such a function is hashed by its name, patched or not, and the old cache is reused.
    first, _ = cached[release]
    assert first["a function that it calls"]["made"] == []
