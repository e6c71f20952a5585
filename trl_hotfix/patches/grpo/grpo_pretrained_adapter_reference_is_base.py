"""GRPO and RLOO switch the adapter of a ``PeftModel`` off for the reference, also one that has been trained before.

TRL 0.27.0 copies the adapter, as another one by the name of "ref" (pull request 4723). It is in every checkpoint then.
The wrappers keep a copy of what is trained beside the model. Where TRL asks for the model without its adapter, they put
the copy in its place for that time. So nothing more is saved, a resumed run has the reference of the adapter that the
script loads, and whatever PEFT knows is copied, such as ``modules_to_save``.

The copy belongs to the trainer, and is made when the constructor has moved and cast the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    constructed,
    default_arguments,
    judge_with_gradients,
    metrics_by_mode,
    scored_completions,
    single_process,
    stub_that_scores,
    tiny_attention_model,
    tiny_tokenizer,
)

_COPY = "_weights_at_the_beginning"


def keep_the_weights_of_the_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Copy what is trained of a PeftModel, if its divergence from the reference is."""
    from peft import PeftModel

    wrapped(*args, **kwargs)
    model = argument(wrapped, args, kwargs, "model")
    is_trained_further = isinstance(model, PeftModel) and argument(wrapped, args, kwargs, "peft_config") is None
    if is_trained_further and instance.beta != 0.0:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        vars(instance)[_COPY] = {name: weight.data.clone() for name, weight in trained.items()}


def take_them_for_the_reference(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Have ``disable_adapter`` put the weights of the beginning in the place of those of now."""
    copy = vars(instance).get(_COPY)
    if copy is None:
        return wrapped(*args, **kwargs)
    model = instance.accelerator.unwrap_model(instance.model)
    weights = {name: weight for name, weight in model.named_parameters() if name in copy}
    # ZeRO-3 and FSDP divide them among the GPUs.
    if [_kind(weight) for weight in weights.values()] != [_kind(value) for value in copy.values()]:
        return wrapped(*args, **kwargs)
    with shadowed(model, "disable_adapter", lambda: _in_place_of(weights, copy)):
        return wrapped(*args, **kwargs)


def _kind(weight: Any) -> tuple[Any, Any]:
    """Return the class and the shape of what a parameter holds. That of FSDP2 has the whole shape in another class."""
    return type(weight.data), weight.shape


@contextmanager
def _in_place_of(weights: Mapping[str, Any], copy: Mapping[str, Any]) -> Iterator[None]:
    """Give these weights the values of ``copy`` inside the block."""
    before = {name: weight.data for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            weight.data = copy[name].to(weight)
        yield
    finally:
        for name, weight in weights.items():
            weight.data = before[name]


_COMPLETIONS = ((5, 3, 1), (10, 3, 1), (8, 9, 1), (3, 11, 1))
"""They are of one length, so that every release has the same mean."""
_REWARDS = (0.5, 2.0, -1.0, 3.0)
_BETA = 0.5


def reference_has_the_adapter(module: ModuleType) -> Outcome:
    """Judge the loss of GRPO, or the advantages of RLOO, by the reference: with the first adapter, or with none."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    name = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{name}Trainer")
    if "reward_funcs" not in inspect.signature(trainer_class.__init__).parameters:
        return absent("this is another trainer of this name")
    # The constructor may be wrapped.
    if "ref" in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release the reference is a copy of the adapter")
    case = _Case(module, name)
    if case.trainer.ref_model is not None:
        return absent("in this release the reference is a copy of the model")
    case.move()
    outcomes = [case.outcome(), case.outcome(training=False)]
    case.move()
    outcomes.append(case.outcome())
    liger_loss = inspect.unwrap(getattr(trainer_class, "compute_liger_loss", trainer_class.__init__))
    if "disable_adapter" in liger_loss.__code__.co_names:
        outcomes.append(case.outcome_with_liger())
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the generations are not of one kind: {outcomes}")
    case.check_after_an_error()
    case.check_divided_weights()
    # A new adapter begins as its base, which is the reference.
    new = _Case(module, name, "new")
    new.move()
    if new.outcome().verdict is not Verdict.REPRODUCED:
        raise AssertionError("the reference of a new adapter is not its base")
    others = [_Case(module, name, beta=0.0)]
    # 0.26 refuses to take both. Before, PEFT merges the first with a progress bar, whose thread would stay.
    with suppress(ValueError), shadowed(tqdm, "monitor_interval", 0):
        others.append(_Case(module, name, "trained and new"))
    if any(_COPY in vars(other.trainer) for other in others):
        raise AssertionError("weights are kept for a reference that is not needed")
    return outcomes[0]


class _Case:
    """A trainer that was made with a PeftModel, with the config of a new adapter, or with both."""

    def __init__(self, module: ModuleType, name: str, adapter: str = "trained", *, beta: float = _BETA) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        self.module, self.by_token = module, name == "GRPO"
        base = tiny_attention_model()
        lora = LoraConfig(r=1, target_modules=["q_proj", "down_proj"], modules_to_save=["gate_proj"])
        is_new = adapter == "new"
        model = base if is_new else get_peft_model(base, lora)
        if not is_new:
            _draw_nothing(model)
            _add(torch.cos, model)
        self.trainer = _constructed(module, name, model, beta, lora if adapter.endswith("new") else None)
        self.model = self.trainer.model
        if is_new:
            _draw_nothing(self.model)
        self.beginning = None if is_new else self._log_probs().detach()

    def move(self) -> None:
        """Train the adapter, in place."""
        import torch

        _add(torch.sin, self.model)

    def outcome(self, training: bool = True) -> Outcome:
        """Judge a generation. The model must have its own weights and methods afterwards."""
        scorer = self._scorer(training)
        weights = [weight.data for weight in _trained(self.model)]
        output = scored_completions(scorer)
        numbers = self._loss(scorer, output) if self.by_token else self._advantages(output)
        self._check_weights(weights)
        return judge_with_gradients(_trained(self.model), [numbers])

    def outcome_with_liger(self) -> Outcome:
        """Judge the reference that Liger's loss is given, where TRL computes it for that loss."""
        import torch

        given: list[Any] = []

        def liger_grpo_loss(*, ref_per_token_logps: Any, **unused: Any) -> Any:
            given.append(ref_per_token_logps)
            return torch.zeros(()), [torch.zeros(1), torch.zeros(1)]

        scorer = self._scorer(True)
        output = scored_completions(scorer)
        vars(scorer).update(liger_grpo_loss=liger_grpo_loss, _get_last_hidden_state=lambda *args, **kwargs: None)
        weights = [weight.data for weight in _trained(self.model)]
        scorer.compute_liger_loss(SimpleNamespace(lm_head=torch.nn.Linear(1, 1)), output)
        self._check_weights(weights)
        places = torch.arange(1.0, given[0].numel() + 1)
        measured, right, wrong = (
            float((places * reference.flatten()).sum()) for reference in (given[0], *self._references())
        )
        return judge(measured, right=right, wrong=wrong)

    def check_after_an_error(self) -> None:
        """Check that the weights are back when the reference has raised an error."""

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ArithmeticError

        scorer = self._scorer(True)
        weights = [weight.data for weight in _trained(self.model)]
        scorer._get_per_token_logps = scorer._get_per_token_logps_and_entropies = fail
        try:
            output = scored_completions(scorer)
            scorer.compute_loss(self.model, output)
        except ArithmeticError:
            self._check_weights(weights)
        else:
            raise AssertionError("the reference is not computed")

    def check_divided_weights(self) -> None:
        """Check that the reference is the base if the weights are not whole on this GPU, or are of another class."""
        import torch

        class Divided(torch.Tensor):  # type: ignore[misc]
            pass

        kept = vars(self.trainer).get(_COPY, {})
        parts = {name: value[:0] for name, value in kept.items()}
        others = {name: value.as_subclass(Divided) for name, value in kept.items()}
        for divided in (parts, others) if kept else ():
            vars(self.trainer)[_COPY] = divided
            if self.outcome().verdict is not Verdict.REPRODUCED:
                raise AssertionError("a part of the weights is taken for all of them")

    def _check_weights(self, weights: Any) -> None:
        now = [weight.data for weight in _trained(self.model)]
        if any(one.data_ptr() != other.data_ptr() for one, other in zip(now, weights, strict=True)):
            raise AssertionError("the model is left with other weights")
        if "disable_adapter" in vars(self.model):
            raise AssertionError("the model is left with another method")

    def _scorer(self, training: bool) -> Any:
        import torch

        settings = {"beta": _BETA, "temperature": 1.0, "loss_type": "bnpo", "use_bias_correction_kl": False}
        rewards, policy = list(_REWARDS), self.model
        scorer = stub_that_scores(self.module, _COMPLETIONS, rewards, model=policy, training=training, **settings)
        vars(scorer).update(
            ref_model=None,
            epsilon_low=0.2,
            epsilon_high=0.2,
            current_gradient_accumulation_steps=1,
            use_liger_loss=False,
            reward_weights=torch.ones(1),
            _metrics=metrics_by_mode(),
        )
        if _COPY in vars(self.trainer):
            vars(scorer)[_COPY] = vars(self.trainer)[_COPY]
        return scorer

    def _log_probs(self) -> Any:
        import torch

        ids = torch.tensor([[3, 4, *completion] for completion in _COMPLETIONS])
        log_probs = self.model(input_ids=ids).logits[:, 1:-1].log_softmax(-1)
        return log_probs.gather(2, ids[:, 2:, None])[..., 0]

    def _references(self) -> list[Any]:
        """Return the log-probs of the right reference and of the base. A new adapter has one reference alone."""
        import torch

        with torch.no_grad(), self.model.disable_adapter():
            base = self._log_probs()
        return [base * 2 if self.beginning is None else self.beginning, base]

    def _loss(self, scorer: Any, output: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the loss of GRPO, and that by the formula with each reference."""
        log_probs, advantages = self._log_probs(), output["advantages"][:, None]
        expected = []
        for reference in self._references():
            kl = (reference - log_probs).exp() - (reference - log_probs) - 1
            expected.append((_BETA * kl - (log_probs - log_probs.detach()).exp() * advantages).mean())
        return scorer.compute_loss(self.model, output), expected[0], expected[1]

    def _advantages(self, output: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return a sum of RLOO's advantages, and those by the formula, as a number with a gradient."""
        import torch

        log_probs, weights = self._log_probs(), torch.arange(1.0, 5.0)
        expected = []
        for reference in self._references():
            rewards = torch.tensor(_REWARDS) - _BETA * (log_probs.detach() - reference).sum(1)
            expected.append(rewards - (rewards.sum() - rewards) / 3)
        measured, right, wrong = (
            (weights * kind * log_probs.sum(1)).sum() for kind in (output["advantages"], *expected)
        )
        return measured, right, wrong


def _trained(model: Any) -> list[Any]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def _draw_nothing(model: Any) -> None:
    """Set to 0 what PEFT draws at random for a new adapter, which is its base with any number there."""
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            weight.data.zero_()


def _add(function: Any, model: Any) -> None:
    """Add numbers to what is trained, in place."""
    import torch

    for number, weight in enumerate(_trained(model)):
        weight.data.add_(function(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape) / 4)


def _constructed(module: ModuleType, name: str, model: Any, beta: float, peft_config: Any) -> Any:
    """Return a trainer that its own constructor has made."""
    import torch
    from datasets import Dataset

    one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
    one_device |= {"deepspeed_plugin": None, "bf16": False, "report_to": [], "world_size": 1, "process_index": 0}
    sizes = {"train_batch_size": 8, "eval_batch_size": 8, "steps_per_generation": 1, "generation_batch_size": 8}
    settings = {"gradient_checkpointing": False, "past_index": -1, "device": torch.device("cpu"), "beta": beta}
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        if hasattr(module, "set_seed"):
            # A self-test must not set the seed of the process.
            stack.enter_context(shadowed(module, "set_seed", lambda *args, **kwargs: None))
        return constructed(
            getattr(module, f"{name}Trainer"),
            model=model,
            args=default_arguments(getattr(module, f"{name}Config"), **one_device, **sizes, **settings),
            reward_funcs=len,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tiny_tokenizer(),
            peft_config=peft_config,
        )
