"""GRPO and RLOO score left-padded prompts at the wrong positions in models with a table of absolute positions.

``generate`` counts positions from the first real token. The forward pass that computes the log-probs of the policy and
of its reference gives no ``position_ids``, and the models below then count the padding too. With rotary or ALiBi
positions that changes nothing, since only distances matter; a learned or sinusoidal table gives every token of a padded
row another embedding.

``position_ids = cumsum(attention_mask) - 1``, of shape ``(batch, length)``, is also what TRL's own ``forward`` in
``trl/trainer/utils.py`` uses.

With the Liger loss (0.17.0 to 1.14.2) the model is not called: the hidden states are those of its decoder. TRL takes
that to be ``.model`` up to 1.5, which of these models XGLM alone has, and ``.base_model`` from 1.6 on, which all have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, called_with, judge, replaced_argument
from ...model import Outcome
from ...testing import default_arguments, stub_trainer

_COUNT_THE_PADDING = frozenset({"gpt2", "gpt_bigcode", "gpt_neo", "xglm"})
"""The ``model_type`` of decoders that look positions up in a table, take ``position_ids`` and otherwise count from 0.

Checked in transformers 4.46.3, 4.57.6 and 5.23.0. OPT and BioGPT (up to transformers 4) count by the attention mask.
"""


def count_positions_from_the_first_token(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the model, the policy or its reference, the positions that ``generate`` gave it."""
    model = argument(wrapped, args, kwargs, "model")
    if _counts_the_padding(instance.accelerator.unwrap_model(model)):
        args, kwargs = replaced_argument(wrapped, args, kwargs, "model", called_with(model, _with_positions))
    return wrapped(*args, **kwargs)


def count_positions_in_the_decoder(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Give the decoder, which is called without its head for the Liger loss, the positions that ``generate`` gave."""
    # The model's argument is ``model`` or ``unwrapped_model``.
    name = next(iter(inspect.signature(wrapped).parameters))
    model = instance.accelerator.unwrap_model(argument(wrapped, args, kwargs, name))
    if _counts_the_padding(model):
        # TRL goes past the adapter too: its layers are within the decoder.
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        args, kwargs = replaced_argument(wrapped, args, kwargs, name, _with_decoder_given_positions(plain))
    return wrapped(*args, **kwargs)


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


_SCORERS = (
    "_get_per_token_logps",
    "_get_per_token_logps_and_entropies",
    "_get_last_hidden_state",
    "_chunked_logps",
)
"""The methods of all releases that call a model, or its decoder, for the log-probs of a batch."""

_KEPT = 3
"""The number of columns of the completions in the self-test."""


def padding_on_the_left_changes_no_log_prob(module: ModuleType) -> Outcome:
    """Compare log-probs and gradients of unequally padded rows with the formula, by each method that computes them.

    A model of another type and one with prompt learning must not be given positions.
    """
    import torch

    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    scorers = [name for name in _SCORERS if name in vars(trainer_class)]
    if not scorers:
        return absent("this release computes the log-probs elsewhere")
    settings = default_arguments(getattr(module, f"{method}Config"), report_to=[], temperature=1.0)
    # Prompts and completions of one to three tokens each: the padding is on both sides.
    columns, first, end = torch.arange(6), torch.tensor([[2], [0], [1], [1]]), torch.tensor([[6], [5], [6], [4]])
    mask = ((columns >= first) & (columns < end)).long()
    batches = (torch.arange(24).view(4, 6) * torch.tensor([3, 4, 5, 7]).view(4, 1, 1)) % 11

    def new_trainer(model: Any) -> Any:
        trainer = stub_trainer(trainer_class, settings, model=model, _is_vlm=False)
        trainer.model_kwarg_keys = {"logits_to_keep"}
        trainer.accelerator.autocast = torch.enable_grad
        # TRL 0.27 labels the timing of the forward with the step.
        trainer.state = SimpleNamespace(global_step=0)
        return trainer

    def scored(trainer: Any, scorer: str, tokens: Any) -> Any:
        outputs = getattr(trainer, scorer)(trainer.model, tokens, mask, _KEPT)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        # What is no log-prob yet is the hidden state before each token.
        return of_tokens(trainer.model, outputs, tokens) if outputs.dim() == 3 else outputs

    def of_tokens(model: Any, hidden: Any, tokens: Any) -> Any:
        return model.lm_head(hidden).log_softmax(-1).gather(-1, tokens[..., -_KEPT:, None])[..., 0]

    def formula(model: Any, tokens: Any, positions: Any) -> Any:
        hidden = model.model.tokens[tokens] + model.model.positions[positions]
        return of_tokens(model, hidden[..., -_KEPT - 1 : -1, :], tokens)

    def with_gradients(model: Any, log_probs: Any) -> Any:
        """Return the log-probs of all rows, their weighted sum, and its gradient by each weight of the model."""
        weighted = (log_probs * mask[:, -_KEPT:] * torch.linspace(0.1, 1.0, len(log_probs)).view(-1, 1, 1)).sum()
        gradients = torch.autograd.grad(weighted, list(model.parameters()))
        return float(weighted), torch.cat([value.flatten() for value in ((log_probs * mask[:, -_KEPT:]), *gradients)])

    model = _model_with_a_table("gpt2")
    right = with_gradients(model, formula(model, batches, (columns - first).clamp(min=0)))
    wrong = with_gradients(model, formula(model, batches, columns.expand(4, 6)))
    sums = []
    for scorer in scorers:
        trainer, another = new_trainer(model), new_trainer(model)
        rows = []
        for tokens, owner, step, training in zip(
            batches, (trainer, trainer, trainer, another), (0, 0, 1, 0), (True, False, True, True), strict=True
        ):
            owner.state.global_step = step
            model.train(training)
            rows.append(scored(owner, scorer, tokens))
        measured = with_gradients(model, torch.stack(rows))
        sums.append(measured[0])
        off = min(float((measured[1] - other[1]).abs().max()) for other in (right, wrong))
        if off > 1e-4:
            raise AssertionError(f"by {scorer} log-probs or gradients are {off} from those of either formula")
        for healthy in (
            _model_with_a_table("llama"),
            _model_with_a_table("gpt2", active_peft_config=SimpleNamespace(is_prompt_learning=True)),
        ):
            by_column = formula(healthy, batches[0], columns.expand(4, 6))
            difference = (scored(new_trainer(healthy), scorer, batches[0]) - by_column) * mask[:, -_KEPT:]
            if (off := float(difference.detach().abs().max())) > 1e-4:
                raise AssertionError(f"by {scorer} log-probs of a model that must be left alone are off by {off}")
    count = len(scorers)
    return judge(sum(sums), right=count * right[0], wrong=count * wrong[0], methods=count)


def _model_with_a_table(model_type: str, **attributes: Any) -> Any:
    """Return a model whose embedding of a token depends on its position, counted from the first column by default.

    It has a decoder, ``.model`` and ``.base_model``, and a head. With ``fused_lm_head=True`` it returns the log-probs
    that TRL's own head does. Its weights are a fixed function of their indices.
    """
    import torch

    def table(rows: int, columns: int, phase: float) -> Any:
        index = torch.arange(rows * columns, dtype=torch.float32, device="cpu")
        return torch.nn.Parameter(torch.sin(index + phase).view(rows, columns))

    class Decoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = table(11, 4, 0.0), table(6, 4, 0.5)

        def forward(self, input_ids: Any, position_ids: Any = None, **unused: Any) -> Any:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
            positions = torch.nn.functional.embedding(position_ids, self.positions)
            return SimpleNamespace(last_hidden_state=self.tokens[input_ids] + positions)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = Decoder(), table(11, 4, 1.0)
            self.config = SimpleNamespace(model_type=model_type)
            self.config.get_text_config = lambda: self.config
            self.__dict__.update(attributes)

        base_model = property(lambda self: self.model)

        def lm_head(self, hidden: Any) -> Any:
            return hidden @ self.head.T

        def get_output_embeddings(self) -> Any:
            return SimpleNamespace(weight=self.head, bias=None)

        def forward(self, logits_to_keep: int = 0, fused_lm_head: bool = False, **inputs: Any) -> Any:
            outputs = SimpleNamespace(logits=self.lm_head(self.model(**inputs).last_hidden_state)[:, -logits_to_keep:])
            if fused_lm_head:
                labels = inputs["labels"][:, 1:].clamp(min=0)
                outputs.log_probs = outputs.logits[:, :-1].log_softmax(-1).gather(2, labels[..., None])[..., 0]
            return outputs

    return Model()
