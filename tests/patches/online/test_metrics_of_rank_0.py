"""What a call appends becomes the mean over the ranks; other metrics, earlier micro-batches and one process stay."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.call import Call
from trl_hotfix.patches.online import metrics_of_rank_0 as patch

NAME = "val/contain_eos_token"


class Ranks:
    """A trainer on the first of several ranks, and how often the ranks met. The others have appended ``others``."""

    def __init__(self, *others: dict[str, list[float]], stats: bool = True, training: bool = True) -> None:
        self.met = 0
        self.metrics: Any = defaultdict(list)
        accelerator = SimpleNamespace(num_processes=1 + len(others), device="cpu", reduce=self.reduce)
        self.trainer = SimpleNamespace(accelerator=accelerator, model=SimpleNamespace(training=training))
        if stats:
            self.trainer.stats = self.metrics
        else:
            self.trainer._metrics = {"train" if training else "eval": self.metrics}
        self.others = others

    def reduce(self, totals: Any, reduction: str) -> Any:
        assert (reduction, totals.dtype, totals.shape) == ("sum", torch.float32, (len(patch._NAMES), 2))
        self.met += 1
        for other in self.others:
            values = [other.get(name, []) for name in patch._NAMES]
            totals = totals + torch.tensor([[sum(each), len(each)] for each in values])
        return totals

    def appending(self, **appended: float) -> Any:
        def step() -> str:
            for name, value in appended.items():
                self.metrics[name].append(value)
            return "the loss"

        call = Call(step, self.trainer)
        assert patch.average_over_the_ranks(call) == "the loss"
        return call


@pytest.mark.parametrize("stats", [True, False], ids=["stats", "_metrics"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_each_micro_batch_has_the_mean_of_the_ranks(stats: bool, training: bool) -> None:
    ranks = Ranks({NAME: [0.5]}, {NAME: [0.0]}, stats=stats, training=training)
    for _ in range(2):
        ranks.appending(**{NAME: 1.0})
    assert ranks.metrics == {NAME: [0.5, 0.5]}
    assert ranks.met == 2


def test_other_metrics_stay() -> None:
    ranks = Ranks({"reward": [3.0]})
    ranks.metrics["reward"].append(7.0)
    call = ranks.appending(reward=1.0, loss=4.0)
    assert ranks.metrics == {"reward": [7.0, 2.0], "loss": [4.0]}
    assert call.acted


def test_ranks_without_tokens_do_not_count() -> None:
    ranks = Ranks({}, {"iw_opd/mean_weight": [3.0]})
    ranks.appending(**{"iw_opd/mean_weight": 1.0})
    ranks.appending()
    assert ranks.metrics == {"iw_opd/mean_weight": [2.0, 3.0]}


def test_nothing_changes_if_no_rank_has_a_number() -> None:
    ranks = Ranks({})
    call = ranks.appending(other=1.0)
    assert ranks.metrics == {"other": [1.0]}
    assert (ranks.met, call.acted) == (1, False)


def test_one_process_meets_nobody() -> None:
    ranks = Ranks()
    call = ranks.appending(reward=1.0)
    assert ranks.metrics == {"reward": [1.0]}
    assert (ranks.met, call.acted) == (0, False)
