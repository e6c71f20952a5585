"""NEFTune's noise in SFT is smaller, the longer the other rows of a batch or the other sequences of a row are.

The paper scales the noise of a sequence by ``alpha / sqrt(L * d)``, where ``L`` is the length of that sequence
(arXiv:2310.05914). The hook of transformers takes the second dimension of the embeddings for ``L``: all columns
of a padded batch, and all tokens of a packed or a flattened row.

One hook of the embeddings keeps them as they were, another one scales what transformers' hook has added between. The
lengths are those that the model is given, since other patches change the batch on its way there.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, sequence_numbers, wrapper
from ...model import Outcome
from ...testing import sft_trainer_of


@wrapper
def scale_noise_by_the_sequence(call: Call) -> Any:
    """Scale the noise of each token by the length of its own sequence."""
    trainer = call.trainer
    if getattr(trainer, "neftune_noise_alpha", None) is None or not call.is_training:
        return call()
    model = trainer.accelerator.unwrap_model(trainer.model)
    embeddings = model.get_input_embeddings()
    # Dynamo does not look again at hooks, and the copies of DataParallel would share one state.
    left_alone = trainer.args.torch_compile or trainer.args.n_gpu > 1
    if left_alone or not hasattr(embeddings, "neftune_noise_alpha"):
        return call()
    call.act()
    noise = _Noise()
    with (
        model.register_forward_pre_hook(noise.note_lengths, with_kwargs=True),
        embeddings.register_forward_hook(noise.keep, prepend=True),
        embeddings.register_forward_hook(noise.scale),
    ):
        return call()


class _Noise:
    """The noise of one call of the model."""

    def note_lengths(self, model: Any, args: Any, inputs: Mapping[str, Any]) -> None:
        self.factor = _factor(inputs)

    def keep(self, embeddings: Any, args: Any, clean: Any) -> None:
        self.clean = clean

    def scale(self, embeddings: Any, args: Any, noised: Any) -> Any:
        # A factor of 1 changes no bit.
        return noised if self.factor is None else noised + (noised - self.clean) * (self.factor - 1).to(noised.dtype)


def _factor(inputs: Mapping[str, Any]) -> Any:
    """Return by what the noise is multiplied, ``(rows, length or 1, 1)``, or None if no length is known."""
    import torch

    input_ids, position_ids, mask = (inputs.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    if input_ids is None:
        return None
    if position_ids is not None and position_ids.shape == input_ids.shape:
        number = sequence_numbers(position_ids)
        lengths = torch.zeros_like(number).scatter_add(1, number, torch.ones_like(number)).gather(1, number)
    elif mask is not None and mask.dim() == 2:
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
    else:
        return None
    return (input_ids.shape[1] / lengths).sqrt()[..., None]


def noise_is_that_of_its_sequence(module: ModuleType) -> Outcome:
    """Embed a row of two tokens beside one of five, and compare the noise of its first token with the formula."""
    import torch

    if module_of(module.SFTTrainer.compute_loss) is not module:
        return absent("transformers computes the loss of this release")
    model = _model_that_keeps_its_embeddings()
    trainer = sft_trainer_of(module, model)
    trainer.neftune_noise_alpha = model.embeddings.neftune_noise_alpha = 5.0
    vars(trainer.args).update(torch_compile=False, padding_free=False)
    token_ids = torch.tensor([[3, 5, 0, 0, 0], [8, 10, 2, 7, 9]])
    batch = {"input_ids": token_ids, "attention_mask": (token_ids > 0).long(), "labels": token_ids}
    with model.embeddings.register_forward_hook(_hook_of_transformers()), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trainer.compute_loss(model, batch)
        torch.manual_seed(0)
        drawn = float(torch.zeros(2, 5, 1).uniform_(-1, 1)[0, 0, 0])
    return judge(float(model.embedded[0, 0, 0]), right=drawn * 5 / 2**0.5, wrong=drawn * 5 / 5**0.5)


def _hook_of_transformers() -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module("transformers.integrations.neftune").neftune_post_forward_hook
    return importlib.import_module("transformers.trainer_utils").neftune_post_forward_hook


def _model_that_keeps_its_embeddings() -> Any:
    """Return a model whose embeddings are 0 without noise. It returns log-probs, as TRL's own head does."""
    import torch

    class Outputs(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    class Model(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(model_type="llama", _attn_implementation="sdpa")

        def __init__(self) -> None:
            super().__init__()
            self.embeddings = torch.nn.Embedding.from_pretrained(torch.zeros(16, 1), freeze=False)

        def get_input_embeddings(self) -> Any:
            return self.embeddings

        def forward(self, input_ids: Any, **others: Any) -> Any:
            self.embedded = self.embeddings(input_ids)
            per_token, learned = self.embedded[:, 1:, 0], input_ids[:, 1:] > 0
            of_head = {"log_probs": per_token, "label_mask": learned, "entropy": per_token, "is_top1": learned}
            return Outputs(loss=self.embedded.sum(), logits=self.embedded.expand(-1, -1, 16), **of_head)

    return Model()
