"""The sequences of a flattened batch have the loss, the gradients and the logits that each has alone."""

from __future__ import annotations

import pickle
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening
from trl.trainer import sft_trainer

from trl_hotfix import witness
from trl_hotfix.testing import (
    StopConstruction,
    constructed,
    default_arguments,
    metrics_by_mode,
    recorded_warnings,
    single_process,
    stub_trainer,
    tiny_attention_model,
    tiny_tokenizer,
)

import tiny

ID, MODULE = "sft-padding-free-contamination", "trl.trainer.sft_trainer"
COLLATE = f"{MODULE}:DataCollatorForLanguageModeling.torch_call"
LOSS, CONSTRUCT = f"{MODULE}:SFTTrainer.compute_loss", f"{MODULE}:SFTTrainer.__init__"

KNOWS_PROMPTS = "completion_only_loss" in sft_trainer.SFTConfig.__dataclass_fields__
COLLATOR_IS_OF_TRL = hasattr(sft_trainer.DataCollatorForLanguageModeling, "padding_free")
"""Whether TRL's own collator flattens (from 0.19 on), and not that of transformers."""

Rows = tuple[list[int], ...]

STEPS: tuple[tuple[Rows, ...], ...] = (
    (([3, 5, 7, 9], [4, 4, 11, 2, 6, 13], [8, 10]), ([2, 6, 4], [12, 5, 9, 3, 7])),
    (([9, 3, 12, 6, 2], [5, 11, 14]), ([7, 13, 3], [10, 2, 8, 4], [6, 9, 5, 11, 3])),
)
"""The sequences of two steps of two micro-batches. Two tokens of each second one are a prompt."""
ROWS = STEPS[0][0]
POSITIONS = [position for row in ROWS for position in range(len(row))]


def trainer_of_one_row(model: Any, *, prompts: bool = True, data_collator: Any = None, **settings: Any) -> Any:
    """Return a trainer as its constructor leaves it, with ``padding_free``. With ``prompts`` these are no labels."""
    usual = {"padding_free": True, "completion_only_loss": prompts, "loss_type": "nll", "max_length": None}
    usual |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False, "pad_to_multiple_of": None}
    arguments = {**usual, "dataset_kwargs": {"skip_prepare_dataset": True}, **settings}
    with single_process(sft_trainer):
        return constructed(
            sft_trainer.SFTTrainer,
            model=model,
            args=default_arguments(sft_trainer.SFTConfig, **arguments),
            data_collator=data_collator,
            train_dataset=Dataset.from_list([{"input_ids": [5, 6, 7]}]),
            processing_class=tiny_tokenizer(),
        )


def trainer_for_the_loss(model: Any, **attributes: Any) -> Any:
    """Return a trainer for ``compute_loss``, which is not constructed."""
    defaults: dict[str, Any] = {
        "model": model,
        "padding_free": True,
        "aux_loss_enabled": False,
        "label_smoother": None,
        "compute_loss_func": None,
        "model_accepts_loss_kwargs": False,
        "num_virtual_tokens": 0,
        "current_gradient_accumulation_steps": 1,
        "control": SimpleNamespace(should_evaluate=False),
        "state": SimpleNamespace(global_step=0),
        "_metrics": metrics_by_mode(),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    args = default_arguments(sft_trainer.SFTConfig, n_gpu=1)
    trainer = stub_trainer(sft_trainer.SFTTrainer, args, **{**defaults, **attributes})
    vars(trainer.accelerator).update(parallelism_config=None, native_amp=False)
    return trainer


def completion_masks(rows: Rows) -> list[list[int]]:
    return [
        [int(not KNOWS_PROMPTS or place >= 2 * (number % 2)) for place in range(len(row))]
        for number, row in enumerate(rows)
    ]


def examples(rows: Rows) -> list[dict[str, list[int]]]:
    if not KNOWS_PROMPTS:
        return [{"input_ids": row} for row in rows]
    masks = completion_masks(rows)
    return [{"input_ids": row, "completion_mask": mask} for row, mask in zip(rows, masks, strict=True)]


def padded_loss(model: Any, rows: Rows) -> Any:
    """Return the mean cross-entropy over the completions of ``rows``, of each sequence alone."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = (
        pad([torch.tensor(values) for values in each], batch_first=True) for each in (rows, completion_masks(rows))
    )
    # Padding comes last, so that nothing attends to it.
    return model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100)).loss


def loss_as_one_sequence(model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss of a batch whose tokens attend to all before them."""
    length = batch["input_ids"].shape[1]
    return model(
        input_ids=batch["input_ids"],
        labels=batch["labels"],
        position_ids=batch.get("position_ids", torch.arange(length)[None]),
        attention_mask=torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None],
        use_cache=False,
    ).loss


def assert_same(model: Any, loss: Any, expected: Any) -> None:
    """Compare two losses and their gradients."""
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True)
    assert max(float((one - other).abs().max()) for one, other in gradients) < 1e-5


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("window", [None, 4], ids=["mask", "padding"])
def test_each_micro_batch_has_the_loss_and_the_gradients_of_its_sequences_alone(
    training: bool, window: int | None
) -> None:
    model = tiny_attention_model().train(training)
    # A model with a sliding window gets a padded batch.
    model.config.sliding_window = window
    trainer, collate = trainer_for_the_loss(model), trainer_of_one_row(model).data_collator
    with recorded_warnings():
        for step, micro_batches in enumerate(STEPS):
            trainer.state.global_step = step
            for rows in micro_batches:
                loss = trainer.compute_loss(model, dict(collate(examples(rows))))
                assert_same(model, loss, padded_loss(model, rows))
    assert tiny.acts(ID, LOSS, trainer) == 4


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_in_trl_the_sequences_attend_to_one_another(training: bool, switch: Any) -> None:
    with switch.off():
        model = tiny_attention_model().train(training)
        collate = trainer_of_one_row(model).data_collator
        for rows in STEPS[0]:
            batch = collate(examples(rows))
            loss = trainer_for_the_loss(model).compute_loss(model, dict(batch))
            torch.testing.assert_close(loss, loss_as_one_sequence(model, batch))
            assert abs(float((loss - padded_loss(model, rows)).detach())) > 1e-3


def assert_positions(batch: Any, positions: list[int]) -> None:
    """Check that sequences begin where ``positions`` do, without a label there, and that padding comes last."""
    expected = [*positions, *[0] * (batch["input_ids"].shape[1] - len(positions))]
    assert batch["position_ids"].tolist() == [expected]
    assert "attention_mask" not in batch
    labelled = (batch["labels"][0] != -100).tolist()
    assert not any(label for label, position in zip(labelled, expected, strict=True) if position == 0)


def labels_of(rows: Rows) -> list[list[int]]:
    """Return the labels of the flattened ``rows``."""
    pairs = zip(rows, completion_masks(rows), strict=True)
    return [
        [
            token if place and is_label else -100
            for row, mask in pairs
            for place, (token, is_label) in enumerate(zip(row, mask, strict=True))
        ]
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_collator_says_where_sequences_begin(workers: int) -> None:
    collate = trainer_of_one_row(tiny_attention_model(), dataloader_num_workers=workers).data_collator
    batch = collate(examples(ROWS))
    assert_positions(batch, POSITIONS)
    assert batch["labels"].tolist() == labels_of(ROWS)


def test_packed_sequences_begin_where_packing_has_noted_it() -> None:
    if not COLLATOR_IS_OF_TRL:
        pytest.skip("packing notes no borders in this release")
    collate = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    # 0.19 notes the positions, and later releases the lengths.
    by_lengths = any("seq_lengths" in name for name in dir(collate))
    packed = {
        "input_ids": [token for row in ROWS for token in row],
        **({"seq_lengths": list(map(len, ROWS))} if by_lengths else {"position_ids": POSITIONS}),
    }
    before = witness.PROCESS.total(ID, COLLATE).acted
    assert_positions(collate([packed, packed]), 2 * POSITIONS)
    assert witness.PROCESS.total(ID, COLLATE).acted == before + 1


def test_padding_to_a_multiple_has_no_labels_and_comes_last() -> None:
    if not COLLATOR_IS_OF_TRL:
        pytest.skip("the collator of transformers pads to no multiple")
    collate = sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=16)
    assert_positions(collate(examples(ROWS)), POSITIONS)


def test_trl_leaves_out_the_positions_and_has_labels_for_first_tokens(switch: Any) -> None:
    with switch.off():
        batch = trainer_of_one_row(tiny_attention_model()).data_collator(examples(ROWS))
    if COLLATOR_IS_OF_TRL:
        assert batch["attention_mask"].all()
        assert "position_ids" not in batch
        assert batch["labels"][0, 0] == ROWS[0][0]
    else:
        assert batch["position_ids"].tolist() == [POSITIONS]
        # From 0.17 on the prompts are labels.
        assert (batch["labels"].tolist() == labels_of(ROWS)) is not KNOWS_PROMPTS


def test_a_padded_batch_is_that_of_trl(switch: Any) -> None:
    collate = trainer_of_one_row(tiny_attention_model(), padding_free=False, dataloader_num_workers=1).data_collator
    rows = [{"input_ids": row} for row in ROWS]
    patched = collate(rows)
    assert "attention_mask" in patched
    assert "torch_call" not in vars(collate)
    with switch.off():
        unpatched = collate(rows)
    assert {name: value.tolist() for name, value in patched.items()} == {
        name: value.tolist() for name, value in unpatched.items()
    }


def test_prompts_are_labels_if_the_user_wants_them_so() -> None:
    trainer = trainer_of_one_row(tiny_attention_model(), prompts=False)
    if not COLLATOR_IS_OF_TRL:
        assert type(trainer.data_collator) is DataCollatorWithFlattening
        assert tiny.acts(ID, CONSTRUCT, trainer) == 0
    batch = trainer.data_collator([{"input_ids": row} for row in ROWS])
    assert batch["labels"].tolist() == [[token if place else -100 for row in ROWS for place, token in enumerate(row)]]


def test_a_collator_of_the_users_stays() -> None:
    own = DataCollatorWithFlattening()
    trainer = trainer_of_one_row(tiny_attention_model(), data_collator=own, padding_free=False)
    assert trainer.data_collator is own
    assert tiny.acts(ID, CONSTRUCT, trainer) == 0


def test_a_collator_for_workers_stays_patched_where_it_is_unpickled() -> None:
    model = tiny_attention_model()
    trainer = trainer_of_one_row(model, dataloader_num_workers=1)
    copied = pickle.loads(pickle.dumps(trainer.data_collator))
    assert copied(examples(ROWS))["position_ids"].tolist() == [POSITIONS]
    assert copied(examples(ROWS))["labels"].tolist() == labels_of(ROWS)
    without_workers = trainer_of_one_row(model)
    if COLLATOR_IS_OF_TRL:
        assert b"trl_hotfix" in pickle.dumps(trainer.data_collator)
        assert tiny.acts(ID, CONSTRUCT, trainer) == 1
        assert "torch_call" not in vars(without_workers.data_collator)
        assert tiny.acts(ID, CONSTRUCT, without_workers) == 0
    else:
        assert tiny.acts(ID, CONSTRUCT, without_workers) == int(KNOWS_PROMPTS)


def flat_batch() -> dict[str, Any]:
    """Return a batch as the patched collator emits it."""
    ids = torch.tensor([[token for row in ROWS for token in row]])
    return {"input_ids": ids, "labels": torch.tensor(labels_of(ROWS)), "position_ids": torch.tensor([POSITIONS])}


def given(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what the model is given by ``compute_loss``."""
    seen: list[dict[str, Any]] = []

    def stop(model: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs)
        raise StopConstruction

    hook = trainer.model.register_forward_pre_hook(stop, with_kwargs=True)
    with suppress(StopConstruction):
        trainer.compute_loss(trainer.model, dict(batch))
    hook.remove()
    return seen[0]


FLAT = flat_batch()
TWO_ROWS = {name: torch.cat([value, value]) for name, value in FLAT.items()}


@pytest.mark.parametrize(
    ("attributes", "attention", "batch"),
    [
        ({"padding_free": False}, "sdpa", FLAT),
        ({}, "flash_attention_2", FLAT),
        ({}, "sdpa", {**FLAT, "attention_mask": torch.ones_like(FLAT["input_ids"])}),
        ({}, "sdpa", TWO_ROWS),
        ({}, "sdpa", {**TWO_ROWS, "position_ids": FLAT["position_ids"]}),
        ({}, "sdpa", {name: FLAT[name] for name in ("input_ids", "labels")}),
    ],
    ids=[
        "no flattened batches",
        "FlashAttention",
        "an attention mask",
        "two rows",
        "positions of all rows",
        "no positions",
    ],
)
def test_trl_has_its_batch_where_nothing_mixes(
    attributes: dict[str, Any], attention: str, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_attention_model()
    monkeypatch.setattr(model.config, "_attn_implementation_internal", attention)
    trainer = trainer_for_the_loss(model, **attributes)
    seen = given(trainer, batch)
    assert all(seen.get(name) is value for name, value in batch.items())
    assert ("attention_mask" in seen) == ("attention_mask" in batch)
    assert tiny.acts(ID, LOSS, trainer) == 0


@pytest.mark.parametrize("by_argument", [True, False])
def test_the_trainer_says_by_its_argument_or_itself_that_batches_are_flattened(by_argument: bool) -> None:
    model = tiny_attention_model()
    trainer = trainer_for_the_loss(model, padding_free=True)
    if by_argument:
        del trainer.padding_free
        trainer.args.padding_free = True
    assert given(trainer, FLAT)["attention_mask"].dim() == 4


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_mask_has_the_dtype_of_the_queries(precision: str, dtype: Any) -> None:
    trainer = trainer_for_the_loss(tiny_attention_model())
    vars(trainer.accelerator).update(native_amp=precision != "no", mixed_precision=precision)
    seen = given(trainer, FLAT)
    assert seen["attention_mask"].dtype == dtype
    # The first and the last of the three sequences fit into one row.
    assert seen["attention_mask"].shape == (2, 1, 6, 6)
    assert seen["use_cache"] is False


def test_without_mixed_precision_the_mask_has_the_dtype_of_the_weights() -> None:
    seen = given(trainer_for_the_loss(tiny_attention_model().bfloat16()), FLAT)
    assert seen["attention_mask"].dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 4], ids=["mask", "padding"])
def test_the_logits_are_those_of_the_sequences_in_the_order_of_the_batch(window: int | None) -> None:
    model = tiny_attention_model()
    model.config.sliding_window = window
    trainer = trainer_for_the_loss(model)
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits for row in ROWS], dim=1)
    with recorded_warnings():
        loss, outputs = trainer.compute_loss(model, dict(FLAT), return_outputs=True)
    torch.testing.assert_close(outputs.logits, expected, atol=1e-5, rtol=1e-5)
    assert_same(model, loss, padded_loss(model, ROWS))


@pytest.mark.parametrize("window", [None, 4], ids=["mask", "padding"])
@pytest.mark.parametrize("shape", [None, (3, 9, 2)], ids=["Liger returns no logits", "prompt tuning returns more"])
def test_other_logits_are_returned_as_they_are(shape: tuple[int, ...] | None, window: int | None) -> None:
    model = tiny_attention_model()
    model.config.sliding_window = window
    trainer = trainer_for_the_loss(model)
    # Liger's loss has no logits; TRL asks for none then.
    trainer.args.use_liger_kernel = True
    logits = None if shape is None else torch.zeros(shape)

    def replace(model: Any, args: Any, outputs: Any) -> Any:
        outputs.logits, outputs.token_accuracy = logits, torch.ones(())
        return outputs

    model.register_forward_hook(replace)
    with recorded_warnings():
        outputs = trainer.compute_loss(model, dict(FLAT), return_outputs=True)[1]
    assert outputs.logits is logits


def test_a_trainer_whose_batches_are_padded_is_warned_once() -> None:
    model = tiny_attention_model()
    model.config.sliding_window = 4
    first, second = trainer_for_the_loss(model), trainer_for_the_loss(model)
    with recorded_warnings() as said:
        for trainer in (first, first, second, first):
            trainer.compute_loss(model, dict(FLAT))
    assert len(said) == 2
    assert "TinyForCausalLM with attn_implementation='sdpa' is not known to keep apart" in said[0]


def test_the_log_has_no_warning_where_the_model_takes_a_mask() -> None:
    model = tiny_attention_model()
    with recorded_warnings() as said:
        trainer_for_the_loss(model).compute_loss(model, dict(FLAT))
    assert said == []
