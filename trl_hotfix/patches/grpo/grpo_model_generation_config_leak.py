"""GRPO and RLOO sample with the checkpoint's generation config where the trainer asks for the library's default.

transformers 4.50 and later 4.x releases merge ``model.generation_config`` into the ``generation_config`` that
``generate`` is given: where the latter has the library's default, the checkpoint's value is taken (transformers issue
42762). transformers 5 does not merge.

TRL 0.26.2 (pull request 4647) puts the trainer's values into the model's config while it generates. The wrapper does so
in a copy that the model has for the time of the call, so that everything else in the config stays, and a saved
checkpoint keeps its own config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, judge, shadowed
from ...model import Outcome
from ...testing import (
    completions_of,
    default_arguments,
    stub_that_generates,
    tiny_attention_model,
    wrapped_like_deepspeed,
)

_ASKED_FOR = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of ``GRPOConfig`` and ``RLOOConfig`` that shape the distribution; ``generation_kwargs`` may name more."""


def sample_as_the_trainer_says(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate with the trainer's values in the model's own config, where the merge would take the model's."""
    import copy

    from transformers import GenerationConfig

    trainer_config = getattr(instance, "generation_config", None)
    # The module that generates has the config, beneath FSDP, PEFT or torch.compile.
    configured = (module for module in instance.model.modules() if vars(module).get("generation_config") is not None)
    model = next(configured, None)
    if trainer_config is None or model is None:  # vLLM generates, or a model that has no config of its own.
        return wrapped(*args, **kwargs)
    asked_for, own, default = map(vars, (trainer_config, model.generation_config, GenerationConfig()))
    names = {*_ASKED_FOR, *(getattr(instance.args, "generation_kwargs", None) or {})}
    merged = {name: asked_for[name] for name in names if asked_for[name] == default.get(name) != own.get(name)}
    if not merged:
        return wrapped(*args, **kwargs)
    changed = copy.deepcopy(model.generation_config)
    vars(changed).update(merged)
    with shadowed(model, "generation_config", changed):
        return wrapped(*args, **kwargs)


def completions_are_sampled_as_the_trainer_asks(module: ModuleType) -> Outcome:
    """Read with which settings transformers samples, where checkpoint and trainer have other ones.

    A trainer samples three times in training, in two steps, and once in an evaluation, and another trainer once. Other
    values than the library's defaults stay as they are, and a trainer without a config of its own has the checkpoint's.
    """
    import transformers
    from packaging.version import Version

    if not Version("4.50") <= Version(transformers.__version__) < Version("5.0.0.dev0"):
        return absent("this transformers takes what it is given")
    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    unwrap = getattr(module, "unwrap_model_for_generation", None)
    if unwrap is None or (method == "RLOO" and not hasattr(trainer_class, "_generate_and_score_completions")):
        return absent("this release generates elsewhere")
    if "generation_kwargs" in inspect.signature(unwrap).parameters:
        return absent("this release gives the model what it asks for itself")
    model = tiny_attention_model()
    # The trainers do not ask for the last one: it stays as it is.
    model.generation_config.update(**_CHECKPOINT, no_repeat_ngram_size=2)
    case = _Case(module, method, model, _DEFAULTS)
    outcomes = [
        case.judged(step, training=training) for step, training in ((0, True), (0, True), (1, True), (1, False))
    ]
    without_more = {name: value for name, value in _DEFAULTS.items() if name in _ASKED_FOR}
    outcomes.append(_Case(module, method, model, without_more).judged(0))
    for asked_for, expected in ((_OTHERS, _OTHERS), (None, _CHECKPOINT)):
        sampled, is_own = _Case(module, method, model, asked_for).sampled(0)
        if sampled != expected or not is_own:
            raise AssertionError(f"asked for {asked_for}, sampled with {sampled}; the model's own config: {is_own}")
    _check_without_a_config()
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some completions are sampled as the trainer asks, and others are not: {outcomes}")
    return outcomes[0]


def _check_without_a_config() -> None:
    """Check that the wrapper leaves the call alone if the model has no config, or no attribute of that name."""
    import torch
    from transformers import GenerationConfig

    without, with_none = torch.nn.Module(), torch.nn.Module()
    with_none.generation_config = None
    for model in (without, with_none):
        instance = SimpleNamespace(generation_config=GenerationConfig(), model=model)
        if sample_as_the_trainer_says(lambda: "sampled", instance, (), {}) != "sampled":
            raise AssertionError("a model without a config does not generate")


_CHECKPOINT = {"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.3, "typical_p": 0.7}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None, "repetition_penalty": 1.0, "typical_p": 1.0}
"""Of the library. Those of the checkpoint take their place, where the trainer asks for them."""

_OTHERS = {"temperature": 0.9, "top_p": 0.8, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.1, "typical_p": 0.9}


class _Sampled(Exception):
    """The settings with which transformers samples."""


class _Case:
    """A trainer that asks for some settings, whose checkpoint has others."""

    def __init__(self, module: ModuleType, method: str, model: Any, asked_for: dict[str, Any] | None) -> None:
        import transformers

        self.model, self.config = model, model.generation_config
        self.before = self.config.to_dict()
        engine = wrapped_like_deepspeed(model)
        engine.config = model.config
        self.asked_for, more = asked_for or {}, None
        if "typical_p" in self.asked_for:
            # typical_p is no argument of its own of the trainer's, and its_own is none of the library's.
            more = {"typical_p": self.asked_for["typical_p"], "its_own": 1}
        trainer_class = getattr(module, f"{method}Trainer")
        settings = default_arguments(getattr(module, f"{method}Config"), generation_kwargs=more)
        config = None
        if asked_for is not None:
            config = transformers.GenerationConfig(do_sample=True, eos_token_id=1, its_own=1, **asked_for)
        self.trainer = stub_that_generates(trainer_class, settings, engine, generation_config=config)
        self.trainer.accelerator.unwrap_model = lambda *args, **kwargs: model
        # 0.14.0 generates in the method that computes the loss.
        self.generates_in_the_loss = "_get_train_sampler" not in vars(trainer_class)

    def _generate(self, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        # The model's own generate begins with this call. The rest of it would draw random numbers.
        raise _Sampled(self.model._prepare_generation_config(generation_config)[0], self.model.generation_config)

    def sampled(self, step: int, *, training: bool = True) -> tuple[dict[str, Any], bool]:
        """Return the settings that completions are sampled with, and whether the model has its own config meanwhile."""
        self.trainer.state.global_step = step
        self.trainer.model.train(training)
        self.trainer.control.should_evaluate = not training
        try:
            with shadowed(self.model, "generate", self._generate):
                if self.generates_in_the_loss:
                    self.trainer.compute_loss(self.trainer.model, [{"prompt": "a"}])
                else:
                    completions_of(self.trainer)
        except _Sampled as sampled:
            used, config = sampled.args
        if self.model.generation_config is not self.config or self.config.to_dict() != self.before:
            raise AssertionError(f"afterwards the model's own config is {self.model.generation_config}")
        if used.no_repeat_ngram_size != 2:
            raise AssertionError(f"the trainer does not ask for {used.no_repeat_ngram_size=}, and the checkpoint has 2")
        return {name: getattr(used, name) for name in _CHECKPOINT}, config is self.config

    def judged(self, step: int, *, training: bool = True) -> Outcome:
        sampled, _ = self.sampled(step, training=training)
        is_wrong = sampled["temperature"] == _CHECKPOINT["temperature"]
        expected = _CHECKPOINT if is_wrong else {**_CHECKPOINT, **self.asked_for}
        if sampled != expected:
            raise AssertionError(f"step {step}: sampled with {sampled}, and not with {expected}")
        return judge(sampled["temperature"], right=1.0, wrong=0.5)
