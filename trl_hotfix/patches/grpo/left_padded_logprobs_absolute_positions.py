"""GRPO and RLOO score left-padded prompts at the wrong positions in models with a table of absolute positions.

``generate`` counts positions from the first real token. The forward pass that computes the log-probs of the policy and
of its reference gives no ``position_ids``, and the models below then count the padding too. With rotary or ALiBi
positions that changes nothing, since only distances matter; a learned or sinusoidal table gives every token of a padded
row another embedding.

``position_ids = cumsum(attention_mask) - 1``, of shape ``(batch, length)``, is also what TRL's own ``forward`` in
``trl/trainer/utils.py`` uses.

With the Liger loss (0.17.0 to 1.14.2) TRL does not call the model: the hidden states come from its decoder. TRL takes
that to be ``.model`` up to 1.5, which of these models XGLM alone has, and ``.base_model`` from 1.6 on, which all have.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, called_with, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer, trainer_and_config

_COUNT_THE_PADDING = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "xglm"})
"""The ``model_type`` of decoders that look positions up in a table, take ``position_ids`` and otherwise count from 0.

Checked in transformers 4.46.3, 4.57.6 and 5.23.0. OPT and BioGPT (up to transformers 4) count by the attention mask.
"""


@wrapper
def count_positions_from_the_first_token(call: Call) -> Any:
    """Give the model, the policy or its reference, the positions that ``generate`` gave it."""
    model = call["model"]
    if not _counts_the_padding(call.trainer.accelerator.unwrap_model(model)):
        return call()
    return call.with_(model=called_with(model, _with_positions))()


@wrapper
def count_positions_in_the_decoder(call: Call) -> Any:
    """Give the decoder, which is called without its head for the Liger loss, the positions that ``generate`` gave."""
    # The model's argument is ``model`` or ``unwrapped_model``.
    name = next(iter(inspect.signature(call.__wrapped__).parameters))
    model = call.trainer.accelerator.unwrap_model(call[name])
    if not _counts_the_padding(model):
        return call()
    # TRL goes past the adapter too: its layers are within the decoder.
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    return call.with_(**{name: _with_decoder_given_positions(plain)})()


def _counts_the_padding(model: Any) -> bool:
    # With prompt learning a virtual prompt precedes the padding, and PEFT accepts no position_ids.
    prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    return not prompt_learning and getattr(getattr(model, "config", None), "model_type", None) in _COUNT_THE_PADDING


def _with_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "position_ids": (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def _with_decoder_given_positions(model: Any) -> Any:
    """Return a view of ``model`` whose decoder, by the names that TRL has for it, is given positions."""
    import wrapt

    def decoder(name: str) -> Any:
        return property(lambda view: called_with(getattr(view.__wrapped__, name), _with_positions))

    class View(wrapt.ObjectProxy):  # type: ignore[type-arg]
        model, base_model = decoder("model"), decoder("base_model")

    return View(model)


_SCORERS = ("_get_per_token_logps", "_get_per_token_logps_and_entropies", "_get_last_hidden_state", "_chunked_logps")
"""The methods of all releases that call a model, or its decoder, for the log-probs of a batch."""


def padding_on_the_left_changes_no_log_prob(module: ModuleType) -> Outcome:
    """Differentiate the log-prob of the third token of a row with one column of padding, by each method that scores.

    The logits are the position times a weight of each of two tokens, which is 0. So the gradient by the weight of the
    token is half of the position before it, which is 1, or 2 with the padding.
    """
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    scorers = [name for name in _SCORERS if name in vars(trainer_class)]
    if not scorers:
        return absent("this release computes the log-probs elsewhere")
    model = _model_of_positions()
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, report_to=[], temperature=1.0),
        model=model,
        model_kwarg_keys={"logits_to_keep"},
        _is_vlm=False,
        # TRL 0.27 labels the timing of the forward with the step.
        state=SimpleNamespace(global_step=0),
    )
    trainer.accelerator.autocast = torch.enable_grad
    log_probs = []
    for scorer in scorers:
        scored = getattr(trainer, scorer)(model, torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 1, 1, 1]]), 1)
        scored = scored[0] if isinstance(scored, tuple) else scored
        # What is no log-prob yet is the hidden state before the token.
        log_probs.append((scored @ model.head.T).log_softmax(-1)[0, 0, 1] if scored.dim() == 3 else scored[0, 0])
    (gradient,) = torch.autograd.grad(sum(log_probs) / len(scorers), model.head)
    return judge(float(gradient[1, 0]), right=0.5, wrong=1.0)


def _model_of_positions() -> Any:
    """Return a model whose hidden state is the position. It also returns the log-probs, as TRL's own head does."""
    import torch

    def decode(input_ids: Any, position_ids: Any = None, **unused: Any) -> Any:
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        return SimpleNamespace(last_hidden_state=positions[..., None].float())

    def forward(logits_to_keep: int = 0, **inputs: Any) -> Any:
        logits = (decode(**inputs).last_hidden_state @ model.head.T)[:, -logits_to_keep:]
        return SimpleNamespace(logits=logits, log_probs=logits[:, :-1].log_softmax(-1)[..., 1])

    model = torch.nn.Module()
    model.head = torch.nn.Parameter(torch.zeros(2, 1))
    model.config = SimpleNamespace(model_type="gpt2", get_text_config=lambda: model.config)
    model.forward, model.model, model.base_model = forward, decode, decode
    model.get_output_embeddings = lambda: SimpleNamespace(weight=model.head, bias=None)
    return model
