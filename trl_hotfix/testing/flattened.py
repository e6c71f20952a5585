"""SFT's loss of a flattened batch, with a model whose logits show what each token has seen."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from .grpo import metrics_by_mode
from .models import tiny_causal_lm
from .trainers import default_arguments, stub_trainer


def model_of_means(*, keeps_apart: bool) -> Any:
    """Return a model whose logits are means of a row of ``weight`` for each token that is attended to.

    It is like an attention whose keys are all equal. It takes a mask of two or four dimensions. ``keeps_apart``:
    without a mask and a cache it tells sequences apart by their positions, as transformers does from 4.53 on.
    Otherwise it has layers that carry a state from one into the next.
    """
    import torch

    from ..authoring import sequence_numbers

    class Outputs(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    class Means(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(model_type="llama", _attn_implementation="sdpa")
        _is_stateful = not keeps_apart
        weight = tiny_causal_lm().weight

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None, **others: Any) -> Any:
            seen = torch.ones(len(input_ids), *[input_ids.shape[1]] * 2).tril()
            if attention_mask is not None and attention_mask.dim() == 4:
                seen *= attention_mask[:, 0] == 0
            elif keeps_apart and attention_mask is None and not others.get("use_cache", True):
                number = sequence_numbers(others["position_ids"])
                seen *= number[:, :, None] == number[:, None]
            logits = seen @ self.weight[input_ids] / seen.sum(-1, keepdim=True)
            targets, learned = labels[:, 1:, None].clamp(min=0), labels[:, 1:] != -100
            log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets)[..., 0] * learned
            # TRL's own head, from 1.15.0 on, returns these four.
            of_head = {"log_probs": log_probs, "label_mask": learned, "entropy": log_probs, "is_top1": learned}
            return Outputs(loss=-log_probs.sum() / learned.sum(), logits=logits, **of_head)

    return Means()


def flattened_batch(module: ModuleType) -> dict[str, Any]:
    """Return the batch of two sequences, 3 and 5, which has no labels, and 8, 10 and 2."""
    from transformers import DataCollatorWithFlattening

    collator_class = module.DataCollatorForLanguageModeling
    # Up to 0.18 the trainer makes that of transformers.
    is_of_trl = hasattr(collator_class, "padding_free")
    collate = collator_class(pad_token_id=0, padding_free=True) if is_of_trl else DataCollatorWithFlattening()
    rows = [{"input_ids": [3, 5], "labels": [-100] * 2}, {"input_ids": [8, 10, 2], "labels": [8, 10, 2]}]
    return dict(collate(rows))


def sft_trainer_of(module: ModuleType, model: Any) -> Any:
    """Return a trainer that computes SFT's loss of a flattened batch, with bf16 autocast."""
    args = default_arguments(module.SFTConfig, n_gpu=1, padding_free=True, loss_type="nll")
    attributes: dict[str, Any] = {"label_smoother": None, "compute_loss_func": None, "model_accepts_loss_kwargs": False}
    attributes |= {"aux_loss_enabled": False, "num_virtual_tokens": 0, "_total_train_tokens": 0, "_tp_size": 1}
    attributes |= {"control": SimpleNamespace(should_evaluate=False), "_metrics": metrics_by_mode()}
    trainer = stub_trainer(module.SFTTrainer, args, model=model, **attributes)
    vars(trainer.accelerator).update(parallelism_config=None, native_amp=True, mixed_precision="bf16")
    return trainer


def gradient_of_seen(model: Any, loss: Any) -> tuple[float, float, float]:
    """Return the derivative by the logit of 10 after 8, that of sequences apart, and that of the whole row.

    Apart, 10 has seen 8, and 2 has seen 8 and 10. In one row both have seen the first sequence, too.
    """
    import torch

    (gradient,) = torch.autograd.grad(loss, model.weight)
    contexts = (8,), (8, 10), (3, 5, 8), (3, 5, 8, 10)
    p = {seen: float(model.weight[list(seen)].mean(0).softmax(-1)[10]) for seen in contexts}
    apart = (p[8,] - 1 + p[8, 10] / 2) / 2
    return float(gradient[8, 10]), apart, (p[3, 5, 8] - 1) / 3 + p[3, 5, 8, 10] / 4
