"""Each rank has a seed of its own once the trainer is made, and other runs have the random state that TRL leaves."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import set_seed

from trl_hotfix.call import Call
from trl_hotfix.patches.distillation.sdpo_sdft_ranks_draw_the_same_samples import seed_each_rank
from trl_hotfix.witness import Count

import tiny
from tiny.data import left_padding_tokenizer

ID = "sdpo-sdft-ranks-draw-the-same-samples"
SEED = 7


@pytest.fixture(params=["SDPO", "SDFT"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(name: str, folder: Path, *, rank: int = 0, ranks: int = 1, **settings: Any) -> Any:
    """Return a real trainer whose accelerator says that it is this rank of so many."""
    trainer_class, config_class = tiny.classes(name)

    class Ranked(Accelerator):  # type: ignore[misc]
        num_processes, process_index = ranks, rank

    class OfRank(trainer_class):  # type: ignore[misc, valid-type]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.__class__ = Ranked

    settings = {"seed": SEED, "teacher_model_kind": "live", "teacher_regularization": "none", **settings}
    rewards = {"reward_funcs": len} if name == "SDPO" else {}
    return tiny.trainer(
        OfRank,
        model=tiny.llama(str(folder), seed=0),
        args=tiny.config(config_class, output_dir=str(folder), num_generations=2, **settings),
        train_dataset=Dataset.from_list([{"prompt": "w1", "privileged_context": "w4"}] * 2),
        tokenizer=left_padding_tokenizer(),
        **rewards,
    )


def drawn() -> list[float]:
    """Return the next number of each generator."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def drawn_after(seed: int) -> list[float]:
    set_seed(seed)
    return drawn()


def acts(name: str, trainer: Any) -> int | None:
    trainer_class, _ = tiny.classes(name)
    return tiny.acts(ID, f"{trainer_class.__module__}:{name}Trainer.__init__", trainer)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (3, 4)])
def test_a_rank_draws_from_its_own_seed(name: str, rank: int, ranks: int, tmp_path: Path) -> None:
    trainer = made(name, tmp_path, rank=rank, ranks=ranks)
    assert drawn() == drawn_after(SEED + rank)
    assert acts(name, trainer) == 1


def test_another_seed_of_the_run_is_heeded(name: str, tmp_path: Path) -> None:
    made(name, tmp_path, rank=1, ranks=2, seed=20)
    assert drawn() == drawn_after(21)


def test_trl_leaves_every_rank_with_the_same_state(name: str, tmp_path: Path, switch: Any) -> None:
    with switch.off():
        first = [made(name, tmp_path, rank=rank, ranks=2) and drawn() for rank in (0, 1)]
    assert first[0] == first[1]


def test_one_process_draws_as_without_the_patch(name: str, tmp_path: Path, switch: Any) -> None:
    # TRL draws numbers of its own after it has set the seed.
    with switch.off():
        made(name, tmp_path)
        expected = drawn()
    trainer = made(name, tmp_path)
    assert drawn() == expected
    assert acts(name, trainer) == 0


def test_each_trainer_of_a_process_is_seeded(name: str, tmp_path: Path) -> None:
    for _ in range(2):
        made(name, tmp_path, rank=1, ranks=2)
        assert drawn() == drawn_after(SEED + 1)


def test_the_seed_is_set_after_the_constructor() -> None:
    def construct() -> str:
        set_seed(SEED)
        torch.rand(3)
        return "made"

    assert seed_each_rank(Call(construct, stub())) == "made"
    assert drawn() == drawn_after(SEED + 1)


@pytest.mark.parametrize(
    "changed", [{"use_vllm": True}, {"tp_size": 2}, {"ranks": 1}], ids=["vLLM", "tensor parallel", "one process"]
)
def test_other_runs_are_not_seeded(changed: dict[str, Any]) -> None:
    count, call = Count(), Call(lambda: set_seed(SEED), stub(**changed))
    call.end(count, seed_each_rank(call))
    assert drawn() == drawn_after(SEED)
    assert count.acted == 0


def test_a_constructor_that_fails_seeds_nothing() -> None:
    set_seed(SEED)
    with pytest.raises(ZeroDivisionError):
        seed_each_rank(Call(lambda: 1 / 0, stub()))
    assert drawn() == drawn_after(SEED)


def stub(*, use_vllm: bool = False, tp_size: int = 1, ranks: int = 2) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(seed=SEED, use_vllm=use_vllm),
        accelerator=SimpleNamespace(num_processes=ranks, process_index=1),
        get_tp_size=lambda: tp_size,
    )
