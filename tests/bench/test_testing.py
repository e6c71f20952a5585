"""The stand-ins for self-tests that no patch uses yet, on real releases."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from trl_hotfix.testing import processes

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

RELEASES = ["0.15.2", "0.16.1", "0.20.0", "0.22.2", "0.27.2", "1.16.0"]
WITHOUT_RLOO = ["0.15.2", "0.16.1", "0.20.0"]
"""RLOO of these releases has no method that only generates and scores."""


@pytest.fixture(scope="module", params=sharing.heavy(RELEASES, smoke=["1.16.0"]))
def release(request: pytest.FixtureRequest) -> str:
    release: str = request.param
    layout.build(layout.places([release]))
    return release


@pytest.fixture(scope="module")
def outputs(release: str) -> dict[str, Any]:
    place = layout.places([release])[-1]
    outputs = process(place, ["-m", "bench.inside.score_completions", "{out}"], 300)
    assert not isinstance(outputs, str), outputs
    return outputs


def scores_of(outputs: dict[str, Any], release: str, method: str) -> dict[str, Any]:
    if method == "RLOO" and release in WITHOUT_RLOO:
        assert "scores completions in no method" in outputs[method]
        pytest.skip(f"RLOO of {release} has no such method")
    scores: dict[str, Any] = outputs[method]
    return scores


def expected_advantages(method: str, rewards: list[float]) -> list[float]:
    """Return the advantages of one group by the formula."""
    count, total = len(rewards), sum(rewards)
    mean = total / count
    if method == "RLOO":
        return [reward - (total - reward) / (count - 1) for reward in rewards]
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (count - 1)) ** 0.5
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_fixed_completions_are_scored_to_the_end_by_the_real_method(
    method: str, outputs: dict[str, Any], release: str
) -> None:
    scores = scores_of(outputs, release, method)
    for mode in ("training", "evaluation"):
        output = scores[mode]
        assert output["prompt_ids"] == [[3, 4]] * 4
        assert output["completion_ids"] == [[5, 6, 1, 0], [7, 8, 9, 2], [5, 1, 0, 0], [6, 6, 6, 1]]
        assert output["completion_mask"] == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
        assert output["reward"] == [pytest.approx(0.4375)]
        assert output["advantages"] == pytest.approx(expected_advantages(method, [1.0, 0.0, 0.5, 0.25]), abs=1e-5)


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_the_completions_may_be_of_two_prompts(method: str, outputs: dict[str, Any], release: str) -> None:
    of_two_prompts = scores_of(outputs, release, method)["of two prompts"]
    groups = [expected_advantages(method, rewards) for rewards in ([1.0, 0.0], [0.5, 0.25])]
    assert of_two_prompts["advantages"] == pytest.approx([*groups[0], *groups[1]], abs=1e-5)


def test_the_log_probs_are_those_of_the_real_forward_passes(outputs: dict[str, Any], release: str) -> None:
    differences = scores_of(outputs, release, "GRPO")["log-probs differ by"]
    assert "ref_per_token_logps" in differences
    assert {name: difference for name, difference in differences.items() if difference > 1e-5} == {}


def test_no_process_is_asked_for_its_rank(outputs: dict[str, Any]) -> None:
    assert outputs["asked for the ranks"] is False


def test_every_collective_that_a_module_of_trl_imports_by_name_has_an_equivalent_in_one_process(release: str) -> None:
    of_accelerate = {"gather", "gather_object", "broadcast", "broadcast_object_list", "reduce", "pad_across_processes"}
    (folder,) = {place.overlay / "trl" for place in layout.places([release])}
    imported = {
        alias.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("accelerate")
        for alias in node.names
    }
    assert imported & of_accelerate <= set(processes._COLLECTIVES)
    assert "gather_object" in imported
