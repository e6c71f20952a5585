"""Means of batches, micro-batches and ranks become the mean of their rows."""

from __future__ import annotations

import copy
import math
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.authoring import Mean, count_of_all_ranks, counted, mean_of_all, without_doubled_rows

REWARD = re.compile("reward")


def test_a_mean_is_its_number() -> None:
    mean = Mean(0.1, 3)
    assert (mean, float(mean), mean.count, sum([mean, mean]) / 2) == (0.1, 0.1, 3, 0.1)
    assert torch.tensor([mean, Mean(2, 1)]).tolist() == torch.tensor([0.1, 2.0]).tolist()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda mean: pickle.loads(pickle.dumps(mean))])
def test_a_copy_has_its_count(copied: Any) -> None:
    assert (copied(Mean(0.5, 7)), copied(Mean(0.5, 7)).count) == (0.5, 7)


def test_what_is_appended_to_a_named_list_is_counted() -> None:
    metrics: dict[str, list[Any]] = {"reward": [0.5], "kl": []}
    with counted(metrics, 3, REWARD):
        metrics["reward"] += [torch.tensor(1.0), 2.0]
        metrics["kl"].append(1.0)
    assert [getattr(value, "count", None) for value in metrics["reward"]] == [None, 3, 3]
    assert metrics["reward"] == [0.5, 1.0, 2.0]
    assert type(metrics["kl"][0]) is float


def test_a_list_that_is_made_inside_is_counted() -> None:
    metrics: dict[str, list[Any]] = {}
    with counted(metrics, 2, REWARD):
        metrics["reward"], metrics["rewards"] = [1.0], [1.0]
    assert metrics["reward"][0].count == 2
    assert type(metrics["rewards"][0]) is float


def test_the_mean_of_all_weighs_by_count() -> None:
    assert mean_of_all([Mean(0.0, 8), Mean(1.0, 1)]) == 1 / 9
    assert mean_of_all([Mean(0.0, 0), Mean(1.0, 1)]) == 1
    assert mean_of_all([Mean(3.0, 4)]) == 3


@pytest.mark.parametrize(
    "values", [[], [1.0], [Mean(0.0, 8), 1.0], [Mean(math.nan, 8), Mean(1.0, 1)], [Mean(0.0, 0), Mean(1.0, 0)]], ids=str
)
def test_it_is_not_known_without_all_counts(values: list[float]) -> None:
    assert mean_of_all(values) is None


def test_the_counts_of_the_ranks_are_added() -> None:
    def gather(count: Any) -> Any:
        return torch.cat([count, count + 1])

    two = SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)
    assert count_of_all_ranks(SimpleNamespace(accelerator=two), 3) == 7
    assert count_of_all_ranks(SimpleNamespace(accelerator=SimpleNamespace(num_processes=1)), 3) == 3


@pytest.mark.parametrize(
    ("at_end", "remainder", "left"), [(True, 3, 3), (True, 0, 8), (True, -1, 8), (False, 3, 8), (True, 9, 8)]
)
def test_only_the_last_batch_has_doubled_rows(at_end: bool, remainder: int, left: int) -> None:
    state = SimpleNamespace(end_of_dataloader=at_end, remainder=remainder)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(gradient_state=state))
    assert list(without_doubled_rows(trainer, range(8))) == list(range(left))
