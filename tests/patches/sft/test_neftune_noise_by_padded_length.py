"""The noise of each token is that of its own sequence, however the batch is padded or packed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer import sft_trainer

from trl_hotfix.patches.sft import neftune_noise_by_padded_length as patch
from trl_hotfix.testing import sft_trainer_of, wrapped_like_deepspeed

import tiny

ID = "neftune-noise-by-padded-length"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
ALPHA, WIDTH = 5.0, 4
PADDED = {
    "input_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9, 2], [5, 2, 0, 0, 0, 0, 0, 0], [6, 7, 8, 2, 0, 0, 0, 0]]),
    "attention_mask": torch.tensor([[1] * 8, [1, 1] + [0] * 6, [1] * 4 + [0] * 4]),
}
LENGTHS = torch.tensor([[8], [2], [4]]).expand(3, 8)
FLATTENED = {
    "input_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9, 2]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0]]),
}
OF_SEQUENCES = torch.tensor([[5] * 5 + [2] * 2 + [1]])
BATCHES = {"padded": (PADDED, LENGTHS), "flattened": (FLATTENED, OF_SEQUENCES)}
batches = pytest.mark.parametrize(("batch", "lengths"), BATCHES.values(), ids=list(BATCHES))


def returns_log_probs(model: Any) -> None:
    """Have the model return log-probs too, as with TRL's own head."""
    forward = model.forward

    def forward_too(*args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        outputs = forward(*args, **inputs)
        if fused_lm_head:
            per_token, learned = outputs.logits[:, 1:, 0], inputs["input_ids"][:, 1:] > 0
            of_head = {"log_probs": per_token, "label_mask": learned, "entropy": per_token, "is_top1": learned}
            for name, value in of_head.items():
                outputs[name] = value
        return outputs

    model.forward = forward_too


class Case:
    """A trainer whose model adds NEFTune's noise, and notes its embeddings."""

    def __init__(self, adapter: Any = None, *, activated: bool = True, **settings: Any) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
        ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes, **heads, **ends))
        returns_log_probs(model)
        if adapter is not None:
            model = peft.get_peft_model(model, adapter)
        self.model, self.embeddings = model, model.get_input_embeddings()
        self.trainer = sft_trainer_of(sft_trainer, model)
        vars(self.trainer.accelerator).update(native_amp=False, mixed_precision="no")
        self.trainer.neftune_noise_alpha = ALPHA
        usual = {"torch_compile": False, "padding_free": False}
        vars(self.trainer.args).update({**usual, **settings})
        if activated:
            self.embeddings.neftune_noise_alpha = ALPHA
            self.embeddings.register_forward_hook(patch._hook_of_transformers())

    def noise(self, batch: dict[str, Any], model: Any = None) -> tuple[Any, Any]:
        """Return the noise of each token, and the numbers that were drawn for it."""
        seen: list[Any] = []

        def note(decoder: Any, args: Any, inputs: Any) -> None:
            seen.append(inputs["hidden_states"] if "hidden_states" in inputs else args[0])

        layer = next(module for name, module in self.model.named_modules() if name.endswith("layers.0"))
        batch = {name: value.clone() for name, value in batch.items()}
        with layer.register_forward_pre_hook(note, with_kwargs=True):
            torch.manual_seed(1)
            self.trainer.compute_loss(self.model if model is None else model, {**batch, "labels": batch["input_ids"]})
        torch.manual_seed(1)
        drawn = torch.zeros_like(seen[0]).uniform_(-1, 1)
        return seen[0] - self.embeddings.weight[batch["input_ids"]], drawn

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


def paper(drawn: Any, lengths: Any) -> Any:
    return drawn * ALPHA / (lengths * WIDTH).sqrt()[..., None]


@batches
def test_the_noise_is_that_of_each_sequence(batch: Any, lengths: Any) -> None:
    case = Case()
    for number in (1, 2):
        noise, drawn = case.noise(batch)
        torch.testing.assert_close(noise, paper(drawn, lengths))
        assert case.acts == number


@batches
def test_transformers_takes_the_length_of_the_batch(batch: Any, lengths: Any, switch: Any) -> None:
    with switch.off():
        noise, drawn = Case().noise(batch)
    torch.testing.assert_close(noise, paper(drawn, torch.full_like(lengths, 8)))


@batches
def test_an_adapter_and_a_wrapped_model_have_it_too(batch: Any, lengths: Any) -> None:
    case = Case(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    noise, drawn = case.noise(batch)
    torch.testing.assert_close(noise, paper(drawn, lengths))
    wrapped = wrapped_like_deepspeed(case.model)
    case.trainer.accelerator.unwrap_model = lambda model, *args, **kwargs: getattr(model, "module", model)
    noise, drawn = case.noise(batch, wrapped)
    torch.testing.assert_close(noise, paper(drawn, lengths))


def test_padding_on_the_left_has_the_noise_of_its_row() -> None:
    flipped = {name: value.flip(1) for name, value in PADDED.items()}
    noise, drawn = Case().noise(flipped)
    torch.testing.assert_close(noise, paper(drawn, LENGTHS))


def test_the_embeddings_are_trained_as_before() -> None:
    case = Case()
    case.noise(PADDED)
    case.trainer.compute_loss(case.model, {**PADDED, "labels": PADDED["input_ids"]}).backward()
    assert float(case.embeddings.weight.grad.abs().sum()) > 0


def test_rows_without_padding_are_the_same_bit_by_bit(switch: Any) -> None:
    whole = {name: value[:1] for name, value in PADDED.items()}
    case = Case()
    noise, _ = case.noise(whole)
    with switch.off():
        assert case.noise(whole)[0].equal(noise)


def test_the_model_has_no_hooks_afterwards_even_after_an_error() -> None:
    case = Case()
    case.noise(PADDED)
    with pytest.raises(IndexError):
        case.trainer.compute_loss(case.model, {**PADDED, "input_ids": PADDED["input_ids"] + 99, "labels": LENGTHS})
    assert len(case.embeddings._forward_hooks) == 1
    assert not case.model._forward_pre_hooks


def test_in_evaluation_there_is_no_noise() -> None:
    case = Case()
    case.model.eval()
    assert not float(case.noise(PADDED)[0].detach().abs().max())
    assert case.acts == 0


LEFT_ALONE: dict[str, Any] = {
    "compiled": lambda: Case(torch_compile=True),
    "several GPUs in one process": lambda: Case(n_gpu=2),
}


@pytest.mark.parametrize("make", LEFT_ALONE.values(), ids=list(LEFT_ALONE))
def test_such_runs_have_the_noise_of_transformers(make: Any) -> None:
    case = make()
    noise, drawn = case.noise(PADDED)
    torch.testing.assert_close(noise, paper(drawn, torch.full_like(LENGTHS, 8)))
    assert case.acts == 0


@pytest.mark.parametrize("alpha", [None, ALPHA], ids=["not asked for", "not activated"])
def test_without_noise_nothing_is_touched(alpha: float | None) -> None:
    case = Case(activated=False)
    case.trainer.neftune_noise_alpha = alpha
    assert not float(case.noise(PADDED)[0].detach().abs().max())
    assert case.acts == 0


UNKNOWN = {
    "no length": {"input_ids": torch.ones(2, 8, dtype=torch.long)},
    "only embeddings": {"inputs_embeds": torch.ones(2, 8, WIDTH), "attention_mask": torch.ones(2, 8)},
    "a mask of four dimensions": {"input_ids": torch.ones(2, 8), "attention_mask": torch.zeros(2, 1, 8, 8)},
}


@pytest.mark.parametrize("inputs", UNKNOWN.values(), ids=list(UNKNOWN))
def test_where_no_length_is_known_the_noise_stays(inputs: dict[str, Any]) -> None:
    noise = patch._Noise()
    noise.note_lengths(None, (), inputs)
    noise.keep(None, (), torch.zeros(2, 8, WIDTH))
    noised = torch.ones(2, 8, WIDTH)
    assert noise.scale(None, (), noised) is noised


def test_positions_of_one_row_for_all_rows_are_not_sequences() -> None:
    factor = patch._factor({**PADDED, "position_ids": torch.arange(8)[None]})
    assert factor[:, 0, 0].tolist() == [1.0, 2.0, pytest.approx(math.sqrt(2))]


def test_a_row_of_nothing_but_padding_is_finite() -> None:
    factor = patch._factor({"input_ids": torch.zeros(1, 4), "attention_mask": torch.zeros(1, 4)})
    assert bool(factor.isfinite().all())


def test_the_scale_has_the_dtype_of_the_embeddings() -> None:
    noise = SimpleNamespace(clean=torch.zeros(3, 8, 2, dtype=torch.bfloat16), factor=patch._factor(PADDED))
    noised = torch.ones(3, 8, 2, dtype=torch.bfloat16)
    assert patch._Noise.scale(noise, None, (), noised).dtype == torch.bfloat16  # type: ignore[arg-type]
