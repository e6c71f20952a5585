"""Models that would mix the sequences of a flattened batch get a padded one, and all others the batch as it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import sft_trainer

from trl_hotfix.authoring import why_sequences_mix
from trl_hotfix.patches.sft import sft_packing_not_apart
from trl_hotfix.testing import flattened_batch, model_of_means, recorded_warnings, sft_trainer_of

import tiny

ID = "sft-packing-not-apart"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
TOKENS = ([3, 5], [8, 10, 2])


class Noting(torch.nn.Module):
    """A model that notes what it is given, and is otherwise the model of means."""

    def __init__(self, *, keeps_apart: bool = False, **attributes: Any) -> None:
        super().__init__()
        self.means, self.given = model_of_means(keeps_apart=keeps_apart), []
        self.config, self._is_stateful = self.means.config, not keeps_apart
        vars(self).update(attributes)

    def forward(self, input_ids: Any, **inputs: Any) -> Any:
        self.given.append({"input_ids": input_ids, **inputs})
        # 1.16.0 asks for the logits in a forward of its own.
        return self.means(input_ids, **{"labels": torch.full_like(input_ids, -100), **inputs})


def batch_of(**others: Any) -> dict[str, Any]:
    return {**flattened_batch(sft_trainer), **others}


def mean_of(model: Any) -> float:
    """Return the mean loss of the two labels of the second sequence, which each token sees alone."""
    logits = [model.means.weight[[8]].mean(0), model.means.weight[[8, 10]].mean(0)]
    return float(-sum(one.log_softmax(-1)[target] for one, target in zip(logits, (10, 2), strict=True)) / 2)


def is_padded(given: dict[str, Any]) -> bool:
    return bool(given["input_ids"].tolist() == [[3, 5, 0], [8, 10, 2]])


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_sequence_has_a_row_in_each_call(training: bool) -> None:
    model = Noting().train(training)
    trainer = sft_trainer_of(sft_trainer, model)
    for number in (1, 2):
        loss = trainer.compute_loss(model, batch_of())
        assert float(loss) == pytest.approx(mean_of(model), abs=1e-6)
        assert tiny.acts(ID, TARGET, trainer) == number
    for given in model.given:
        assert is_padded(given)
        assert given["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
        assert given["labels"].tolist() == [[-100] * 3, [-100, 10, 2]]
        assert not given.keys() & {"position_ids", "seq_idx", "cu_seq_lens_q", "max_length_k"}


def test_the_batch_of_the_caller_stays() -> None:
    model, batch = Noting(), batch_of()
    before = {name: value.clone() for name, value in batch.items() if hasattr(value, "clone")}
    sft_trainer_of(sft_trainer, model).compute_loss(model, batch)
    assert all(batch[name].equal(value) for name, value in before.items())


def test_an_evaluation_gets_the_logits_of_the_flattened_batch() -> None:
    model = Noting().eval()
    _, outputs = sft_trainer_of(sft_trainer, model).compute_loss(model, batch_of(), return_outputs=True)
    weight = model.means.weight
    expected = [weight[tokens[: number + 1]].mean(0) for tokens in TOKENS for number in range(len(tokens))]
    torch.testing.assert_close(outputs["logits"], torch.stack(expected)[None])


def test_trl_mixes_the_sequences(switch: Any) -> None:
    model = Noting()
    with switch.off():
        loss = sft_trainer_of(sft_trainer, model).compute_loss(model, batch_of())
    assert abs(float(loss) - mean_of(model)) > 0.1
    assert model.given[0]["input_ids"].shape == (1, 5)


def test_one_warning_tells_why() -> None:
    model = Noting()
    trainer = sft_trainer_of(sft_trainer, model)
    with recorded_warnings() as lines:
        for _ in range(3):
            trainer.compute_loss(model, batch_of())
    (line,) = [line for line in lines if "padding-free" in line]
    assert "carry a state" in line


def test_a_model_that_keeps_sequences_apart_gets_the_batch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_packing_not_apart, "why_sequences_mix", lambda model, no_cache: None)
    model = Noting(keeps_apart=True)
    trainer = sft_trainer_of(sft_trainer, model)
    assert float(trainer.compute_loss(model, batch_of())) == pytest.approx(mean_of(model), abs=1e-6)
    assert model.given[0]["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert tiny.acts(ID, TARGET, trainer) == 0


OTHERS: dict[str, dict[str, Any]] = {
    "a mask": {"attention_mask": torch.ones(1, 5, dtype=torch.long)},
    "two rows": {name: torch.ones(2, 3, dtype=torch.long) for name in ("input_ids", "labels", "position_ids")},
    "positions of three axes": {"position_ids": torch.arange(5).expand(3, 1, 5)},
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=list(OTHERS))
def test_other_batches_stay(others: dict[str, Any]) -> None:
    model = Noting()
    trainer = sft_trainer_of(sft_trainer, model)
    batch = batch_of(**others)
    trainer.compute_loss(model, dict(batch))
    assert model.given[0]["input_ids"].equal(batch["input_ids"])
    assert tiny.acts(ID, TARGET, trainer) == 0


def soft_prompt(folder: str) -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(tiny.llama(folder, seed=0), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


MODELS = {
    "OPT": lambda folder: tiny.opt(folder, seed=0),
    "LFM2": lambda folder: tiny.lfm2(folder, seed=0),
    "prompt tuning": soft_prompt,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_the_reason_is_known_of_each_kind_of_model(make: Any, tmp_path: Path) -> None:
    assert why_sequences_mix(make(str(tmp_path)), no_cache=True) is not None


def test_a_llama_keeps_them_apart(tmp_path: Path) -> None:
    assert why_sequences_mix(tiny.llama(str(tmp_path), seed=0), no_cache=True) is None


def of_type(name: str) -> Any:
    return SimpleNamespace(model_type=name, _attn_implementation="sdpa", layer_types=["conv"])


@pytest.mark.parametrize(
    ("attributes", "seq_idx", "asks", "padded"),
    [
        ({"config": of_type("lfm2")}, True, True, False),
        ({"config": SimpleNamespace(get_text_config=lambda decoder=True: of_type("qwen3_5_text"))}, True, True, False),
        ({"config": of_type("lfm2")}, False, True, True),
        ({"config": of_type("lfm2")}, True, False, True),
        ({"config": of_type("mamba2")}, True, True, True),
        (
            {
                "config": of_type("lfm2"),
                "active_peft_config": SimpleNamespace(is_prompt_learning=True, peft_type="PROMPT_TUNING"),
            },
            True,
            True,
            True,
        ),
    ],
    ids=["kernels", "kernels of a text model", "no seq_idx", "older transformers", "no kernels", "prompt tuning"],
)
def test_kernels_that_are_given_seq_idx_get_the_batch_as_it_is(
    attributes: Any, seq_idx: bool, asks: bool, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft_packing_not_apart, "_transformers_asks_for_kernels", lambda: asks)
    batch = batch_of()
    batch.pop("seq_idx", None)
    if seq_idx:
        batch["seq_idx"] = torch.tensor([[0, 0, 1, 1, 1]])
    model = Noting(**attributes)
    sft_trainer_of(sft_trainer, model).compute_loss(model, batch)
    assert is_padded(model.given[0]) is padded


def test_transformers_raises_without_kernels_where_it_is_left_alone(tmp_path: Path) -> None:
    if not sft_packing_not_apart._transformers_asks_for_kernels():
        pytest.skip("this transformers mixes the sequences")
    ids, positions = torch.arange(3, 8)[None], torch.tensor([[0, 1, 0, 1, 2]])
    with pytest.raises(ValueError, match="keep packed sequences apart"):
        tiny.lfm2(str(tmp_path), seed=0)(ids, position_ids=positions, seq_idx=torch.tensor([[0, 0, 1, 1, 1]]))
