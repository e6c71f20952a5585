"""A GRPO loss of 0.0 looks the same in a healthy run and in one that learns nothing; one log line names the case.

``log`` and ``__init__`` run unchanged. A case follows from what the trainer logs anyway. Each is reported once per run,
on the main process, and no collective operation is called.

- No bug (TRL issues 2703, 3452): the ratio of the probabilities is 1 while the policy is the one that sampled, and the
  advantages of a group add up to 0. The value of the loss is then beta * KL (DeepSeekMath, arXiv:2402.03300, equation
  3); its gradient is the policy gradient. transformers 4 prints the loss rounded to four digits.
- No signal: all rewards of each group are equal, so all advantages are 0.
- No gradient: ``grad_norm`` is 0 although there is a signal, e.g. with frozen adapters (issue 3926).
- An adapter that is not trained as intended: ``peft_config`` on top of a ``PeftModel`` (3882, 4713), an adapter outside
  the path of the Liger loss (5977, 6186), a ``PeftModel`` that was loaded for inference.

One logged step may prove nothing, since a hard task has steps without a signal. The diagnosis then waits:

- ``frac_reward_zero_std``, the share of the groups without a signal, is logged from 0.18 on. ``reward_std`` cannot
  replace it from 0.27 on, where it is that of the batch. Both are means over the generations of a log entry, and
  neither is negative: a mean of 0 (or of 1, for the share) means 0 (or 1) in each generation. "No signal" takes ten
  generations, the first of the run, in which the loss is not above what beta * KL explains: MiniLLM has a loss besides
  the rewards, which are all 0 by default.
- ``grad_norm`` is that of the last step before the log entry and, with ``steps_per_generation``, of a part of a
  generation. In a healthy run it is 0 with at most the probability ``share`` that a group has no signal. "No gradient"
  waits until the sum of ``1 - share`` is ten and there never was a gradient: the probability of that is at most
  ``prod(share) <= exp(-10)``. Under fp16 it waits for forty, because the first steps are skipped until the loss scale
  fits (DeepSpeed logs 0 for them). A model with no trainable tensor when training began needs no proof: PEFT thaws a
  frozen adapter after it was disabled for the reference, so its ``grad_norm`` is not 0, but the optimizer does not have
  it. DeepSpeed's optimizer shows partitions, or under ZeRO-3 nothing: what it has is not known.
- With ``scale_rewards="batch"`` or ``normalize_then_sum`` the share is that of the batch. It then proves only that no
  group has a signal.

A step without ``grad_norm`` (``max_grad_norm=0``, some engines) or with an infinite one proves nothing about gradients.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import act, argument, judge, shadowed
from ...model import Outcome
from ...testing import stub_grpo_trainer

_PATIENCE = 10
_SHOWN_AS_ZERO = 5e-5

_log = logging.getLogger("trl_hotfix")


@dataclass(slots=True)
class _Run:
    """The facts about a run that its log has shown so far.

    ``signal_without_gradient`` is the sum of ``1 - share`` over the log entries whose ``grad_norm`` is 0.
    """

    reported: set[str] = field(default_factory=set)
    entries: int = 0
    zeros: int = 0  # logged losses of 0 in a row, with a signal and a gradient
    had_signal: bool = False
    generations_without_signal: int = 0
    had_gradient: bool = False
    signal_without_gradient: float = 0.0


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


def _no_bug(loss: float, grad_norm: float, beta: float, kl: float) -> str:
    return (
        f"no bug: the loss is {abs(loss):.3g}, grad_norm is {grad_norm:.3g}, so the policy is trained. As long as it "
        "is the one that sampled (num_iterations=1), pi/pi_old is 1 and the advantages of a group add up to 0: where "
        'each sequence weighs the same (loss_type="grpo", TRL before 0.16) or all are equally long, the loss as a '
        f"number is beta * KL = {beta:g} * {kl:.3g} = {beta * kl:.3g}. Its gradient is not 0. Judge the run by its "
        "rewards, not by its loss"
    )


def _no_signal(generations: int, beta: float, mean: Mapping[str, float]) -> str:
    consequence = "the KL term alone moves the policy" if beta else "nothing is trained"
    rewards = ", ".join(
        f"{name.removeprefix('rewards/').removesuffix('/mean')} (mean {value:.4g})"
        for name, value in mean.items()
        if name.startswith("rewards/") and not name.endswith("/std")
    )
    return (
        f"no learning signal so far: in each of the first {generations} generations all completions of every group got "
        f"the same reward, so all advantages are 0 and {consequence}. Look at what the reward functions give to "
        f"completions of one prompt: {rewards}"
    )


def _no_gradient(trainer: Any, reason: str) -> str:
    state = "; ".join(_state(trainer))
    return f"no gradient: {reason}. In numbers: {state}. What is to be trained needs requires_grad=True before train()"


def _merged(given: Any, own: Any) -> bool:
    """Return whether ``own``, the trainer's model, no longer has the model that was given inside it."""
    return all(module is not given for module in own.modules())


def _lost(before: Mapping[str, Any], given: Any, own: Any) -> str:
    """Report an adapter, whose tensors were ``before`` when ``peft_config`` was applied to the model that has it."""
    if _merged(given, own):
        fate = "merged into the base model, to which the adapter that is saved now belongs"
    else:
        after = dict(given.named_parameters())
        changed = sum(not after[name].equal(tensor.to(after[name])) for name, tensor in before.items())
        fate = "put aside, and the run starts without them"
        if changed:
            fate = f"initialised again in {changed} cases, and what they had learned is lost"
    return (
        f"peft_config was given with a model that has a trained adapter already: its {len(before)} tensors were "
        f"{fate}. To go on training the adapter, leave peft_config out"
    )


def _missed(model: Any) -> Iterator[str]:
    """Report the adapters that get no gradient from the Liger loss: of the LM head, and of prompt learning."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer) and (tensors := sum(weight.requires_grad for weight in head.parameters())):
        yield f"the {tensors} adapter tensors of the LM head"
    if prompts := [name for name, config in model.peft_config.items() if config.is_prompt_learning]:
        yield f"prompt learning ({', '.join(prompts)})"


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _adapter(model: Any) -> dict[str, Any]:
    """Copy the tensors of the active adapters. Return none if B is 0, as LoRA starts it, or is not on this rank."""
    marks = [f".{name}." for name in model.active_adapters]
    tensors = {name: tensor for name, tensor in model.named_parameters() if any(mark in name for mark in marks)}
    if not all(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name):
        return {}
    return {name: tensor.data.clone() for name, tensor in tensors.items()}


def _inputs_need_grad(model: Any) -> bool:
    """Return whether the outputs of the embedding need gradients, as checkpointing of frozen layers requires."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    return bool(embedding._forward_hooks) or any(weight.requires_grad for weight in embedding.parameters())


def _state(trainer: Any) -> Iterator[str]:
    """Yield the facts that explain a missing gradient."""
    model = trainer.model
    tensors = dict(model.named_parameters())
    if (optimized := _optimized(trainer)) is not None:
        yield f"the optimizer has {optimized} of {len(tensors)} parameter tensors"
    for adapter in model.active_adapters if _is_peft(model) else ():
        trainable = [tensor.requires_grad for name, tensor in tensors.items() if f".{adapter}." in name]
        yield f"of adapter {adapter}, {trainable.count(False)} of {len(trainable)} are frozen"
    yield f"gradient checkpointing is {'on' if trainer.args.gradient_checkpointing else 'off'}"
    yield f"gradients of the inputs are {'on' if _inputs_need_grad(model) else 'off'}"


def _optimized(trainer: Any) -> int | None:
    """Count the tensors in the optimizer: those that were trainable when training began. None: they are hidden."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return None
    return sum(len(group["params"]) for group in trainer.optimizer.param_groups)


def _is_cut_off(trainer: Any) -> bool:
    """Detect reentrant checkpointing over inputs without gradients, where some adapters do not train (TRL 2848)."""
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant") is not False
    return trainer.args.gradient_checkpointing and reentrant and not _inputs_need_grad(trainer.model)


def _share_without_signal(trainer: Any, metrics: Mapping[str, Sequence[float]]) -> float | None:
    """Return the share of the groups (of the generations up to TRL 0.17) without a signal; None if it is unknown."""
    deviations = metrics.get("reward_std")
    if not deviations:
        # No generation belongs to this log entry.
        return None
    shares = metrics.get("frac_reward_zero_std") or [float(deviation < 1e-6) for deviation in deviations]
    if max(deviations) < 1e-6 or min(shares) == 1.0:
        return 1.0
    of_batch = getattr(trainer.args, "scale_rewards", None) == "batch"
    of_batch = of_batch or getattr(trainer.args, "multi_objective_aggregation", None) == "normalize_then_sum"
    return None if of_batch else sum(shares) / len(shares)


def _diagnose(trainer: Any, run: _Run, logs: Mapping[str, Any], metrics: Mapping[str, Sequence[float]]) -> str | None:
    """Return the case if this log entry completes its proof. ``metrics`` has a value for each generation in it."""
    mean = {name: sum(values) / len(values) for name, values in metrics.items() if values}
    loss, grad_norm = logs["loss"], logs.get("grad_norm", math.nan)
    beta, kl = trainer.beta, mean.get("kl", 0.0)
    share = _share_without_signal(trainer, metrics)
    run.entries += 1
    # With equal rewards GRPO's loss is the KL term. Sums over tokens and over sequences weigh it differently.
    if share == 1.0 and abs(loss) < 10 * beta * kl + _SHOWN_AS_ZERO:
        run.generations_without_signal += len(metrics["reward_std"])
    elif "reward_std" in mean:
        run.had_signal = True
    if grad_norm > 0:
        run.had_gradient = True
    elif grad_norm == 0 and share is not None:
        run.signal_without_gradient += 1.0 - share
    if share is not None:
        zero = abs(loss) < _SHOWN_AS_ZERO and 1e-6 < grad_norm < math.inf and share < 1.0
        run.zeros = run.zeros + 1 if zero else 0

    if "no gradient" not in run.reported:
        patience = 4 * _PATIENCE if trainer.args.fp16 else _PATIENCE
        if _optimized(trainer) == 0:
            return _no_gradient(trainer, "nothing was trainable when training began")
        if not run.had_gradient and run.signal_without_gradient >= patience:
            reason = f"grad_norm was 0 in all {run.entries} logged steps, with rewards that differ"
            masks = getattr(trainer.args, "mask_truncated_completions", False)
            if masks and mean.get("completions/clipped_ratio") == 1:
                reason += "; every completion was cut off, and mask_truncated_completions=True leaves those out"
            return _no_gradient(trainer, reason)
    if not run.had_signal and run.generations_without_signal >= _PATIENCE:
        return _no_signal(run.generations_without_signal, beta, mean)
    # If the KL term is large enough to show, 0 has another reason.
    if run.zeros >= 3 and beta * kl <= 10 * _SHOWN_AS_ZERO and not _is_cut_off(trainer):
        return _no_bug(loss, grad_norm, beta, kl)
    return None


def say_why_the_loss_is_zero(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Examine each log entry of a training step until one case is proven."""
    run = _runs.setdefault(instance, _Run())
    logs = argument(wrapped, args, kwargs, "logs")
    message = None
    # The entry at the end of a run has no loss, that of an evaluation has an eval_loss, a callback's own has neither.
    if instance.accelerator.is_main_process and "loss" in logs:
        # Up to 0.15 the metrics are not kept by mode.
        message = _diagnose(instance, run, logs, instance._metrics.get("train", instance._metrics))
    result = wrapped(*args, **kwargs)
    if message is not None and (case := message.partition(":")[0]) not in run.reported:
        run.reported.add(case)
        act()
        _log.log(logging.INFO if case == "no bug" else logging.WARNING, "GRPO: %s", message)
    return result


def say_what_became_of_the_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compare the model that was given with the one that the trainer has after ``__init__``."""
    model = argument(wrapped, args, kwargs, "model")
    before: dict[str, Any] = {}
    messages = []
    if _is_peft(model):
        if argument(wrapped, args, kwargs, "peft_config") is not None:
            before = _adapter(model)
        elif not any(tensor.requires_grad for tensor in model.parameters()):
            adapters = [name for name in model.active_adapters if model.peft_config[name].inference_mode]
            if adapters:
                messages.append(
                    f"0 of {len(list(model.parameters()))} parameter tensors are trainable, since the adapter "
                    f"({', '.join(adapters)}) was loaded for inference. Load it with "
                    "PeftModel.from_pretrained(..., is_trainable=True)"
                )
                # That follows from it, and would be reported twice.
                _runs.setdefault(instance, _Run()).reported.add("no gradient")
    result = wrapped(*args, **kwargs)
    if before:
        messages.append(_lost(before, model, instance.model))
    liger = getattr(instance, "use_liger_loss", False) or getattr(instance, "use_liger_kernel", False)
    if liger and _is_peft(instance.model):
        messages += [
            f"the Liger loss goes past an adapter: no gradient reaches {adapter}. Train without Liger, or without it"
            for adapter in _missed(instance.model)
        ]
    for message in messages:
        act()
        if instance.accelerator.is_main_process:
            _log.warning("GRPO: %s", message)
    return result


_Messages = dict[int, str]
"""What was said of a run, with its level, by the number of the log entry. What is said before the first one has 0."""

_LEARNING: Mapping[str, Any] = {"loss": 0.1, "grad_norm": 0.5, "reward_std": [0.3], "frac_reward_zero_std": [0.0]}
_ZERO = {**_LEARNING, "loss": 0.0}
_NO_GRADIENT = {**_ZERO, "grad_norm": 0.0}
_NO_SIGNAL = {**_NO_GRADIENT, "reward_std": [0.0], "frac_reward_zero_std": [1.0]}


class _Metrics(dict[str, list[float]]):
    """Metrics that are also those of each mode, for releases that keep them by mode and for those that do not."""

    def __missing__(self, mode: str) -> _Metrics:
        return self


def the_case_is_named(module: ModuleType) -> Outcome:
    """Count the runs of which exactly what is so was said, and at the log entry that proves it.

    They are short: but for the first one, four generations are enough here.
    Of healthy runs nothing may be said, and what is said of an adapter must be what became of it.
    """
    messages: _Messages = {}
    entry = 0

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage().removeprefix("GRPO: ")
        messages[entry] = f"{messages[entry]}; {text}" if entry in messages else f"{record.levelname}: {text}"
        return False

    def said(*entries: tuple[int, Mapping[str, Any]], trainer: Any = None, **settings: Any) -> _Messages:
        """Return what is said of a run with this many of each log entry: the metrics are the values that are lists."""
        nonlocal entry
        trainer = trainer or _trainer(module, **settings)
        messages.clear()
        entry = 0
        for values in [values for times, values in entries for _ in range(times)]:
            entry += 1
            metrics = {name: value for name, value in values.items() if isinstance(value, list)}
            trainer._metrics = _Metrics(metrics)
            trainer.log({name: value for name, value in values.items() if name not in metrics})
        return messages.copy()

    def fate(given: Any, peft_config: Any = None, become: Callable[[], Any] = lambda: None, **settings: Any) -> Any:
        """Return a trainer that was constructed of a model, and what was said. ``become`` is what TRL does to it."""
        nonlocal entry
        trainer = _trainer(module, **settings)

        def construct(model: Any, peft_config: Any = None) -> None:
            trainer.model = become() or model

        messages.clear()
        entry = 0
        say_what_became_of_the_adapter(construct, trainer, (), {"model": given, "peft_config": peft_config})
        return trainer, messages.get(0, "")

    level = _log.level
    _log.setLevel(logging.INFO)
    _log.addFilter(keep)
    try:
        cases = [(said((12, _NO_SIGNAL)), {10: ["first 10 generations"]})]
        with shadowed(sys.modules[__name__], "_PATIENCE", 4):
            cases += _cases(said)
        wrong = [
            (found, expected)
            for found, expected in cases
            if found.keys() != expected.keys() or not all(part in found[at] for at in expected for part in expected[at])
        ]
        if 0 < len(wrong) < len(cases):
            raise AssertionError(f"of a run it was said: {wrong[0][0]}. Expected: {wrong[0][1]}")
        if not wrong:
            with shadowed(sys.modules[__name__], "_PATIENCE", 4):
                _check_healthy(said)
            if "peft" in sys.modules:
                _check_adapters(said, fate)
    finally:
        _log.removeFilter(keep)
        _log.setLevel(level)
    return judge(len(cases) - len(wrong), right=len(cases), wrong=0)


def _trainer(module: ModuleType, *, main: bool = True, model: Any = None, **settings: Any) -> Any:
    optimizer = SimpleNamespace(param_groups=[{"params": [1]}, {"params": []}])
    usual = {"beta": 0.0, "optimizer": optimizer, "fp16": False, "gradient_checkpointing": False}
    trainer = stub_grpo_trainer(module, **{**usual, **settings})
    trainer.accelerator.is_main_process = main
    trainer.model = _usual_model() if model is None else model
    trainer.use_liger_loss = settings.get("use_liger_loss", False)
    trainer.state = SimpleNamespace(epoch=None, log_history=[], global_step=1, num_input_tokens_seen=0)
    trainer.callback_handler = SimpleNamespace(on_log=lambda args, state, control, logs: control)
    return trainer


def _with_embedding(model: Any) -> Any:
    import torch

    model.embedding = torch.nn.Embedding(1, 1)
    model.get_input_embeddings = lambda: model.embedding
    return model


@functools.cache
def _usual_model() -> Any:
    import torch

    return _with_embedding(torch.nn.Module())


_NO_PARAMETERS = SimpleNamespace(param_groups=[{"params": []}])


def _cases(said: Callable[..., _Messages]) -> Iterator[tuple[_Messages, dict[int, list[str]]]]:
    """Yield what was said of runs, and parts of what should have been."""
    import torch

    # No bug: at the third zero in a row. The KL term is the mean over the generations.
    yield said((5, _ZERO)), {3: ["INFO: no bug: the loss is 0, grad_norm is 0.5", "beta * KL = 0 * 0 = 0. Its"]}
    yield said((2, _ZERO), (1, _LEARNING), (3, _ZERO)), {6: ["no bug"]}
    yield said((2, _ZERO), (1, {"loss": 0.0, "grad_norm": 0.5}), (1, _ZERO)), {4: ["no bug"]}
    few = {**_ZERO, "loss": -4e-5, "kl": [0.001, 0.003]}
    yield said((3, few), beta=0.1), {3: ["the loss is 4e-05", "beta * KL = 0.1 * 0.002 = 0.0002. Its"]}
    yield said((3, {**_ZERO, "kl": [10 * _SHOWN_AS_ZERO]}), beta=1.0), {3: ["beta * KL = 1 * 0.0005 = 0.0005"]}
    yield said((3, _ZERO), beta=1.0), {3: ["beta * KL = 1 * 0 = 0"]}
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}
    yield said((3, _ZERO), **checkpointing), {3: ["no bug"]}
    yield said((3, _ZERO), model=_frozen(), **{**checkpointing, "gradient_checkpointing": False}), {3: ["no bug"]}
    not_reentrant = {**checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    yield said((3, _ZERO), model=_frozen(), **not_reentrant), {3: ["no bug"]}

    # No signal: at the fourth generation. The share of the groups is not logged before 0.18.
    rewards = {"rewards/a/mean": [0.5], "rewards/a/std": [0.0], "rewards/b": [0.0, 0.5], "completions/length": [9.0]}
    none = {4: ["WARNING: no learning signal so far", "first 4 generations", "nothing is trained", ": a (mean 0.5), b"]}
    none[4].append("b (mean 0.25)")
    yield said((6, {**_NO_SIGNAL, **rewards})), none
    yield said((6, {**_NO_SIGNAL, "reward_std": [0.0, 0.0]})), {2: ["first 4 generations"]}
    without_share = {name: value for name, value in _NO_SIGNAL.items() if name != "frac_reward_zero_std"}
    yield said((6, without_share)), {4: ["no learning signal"]}
    yield said((6, {**_NO_SIGNAL, "reward_std": [0.3]}), scale_rewards="batch"), {4: ["no learning signal"]}
    yield said((6, {**_NO_SIGNAL, "reward_std": [9e-7], "frac_reward_zero_std": [0.0]})), {4: ["no learning signal"]}
    yield said((6, {**_NO_SIGNAL, "grad_norm": 0.5})), {4: ["no learning signal"]}
    kl_alone = {**_NO_SIGNAL, "loss": 1.45e-4, "grad_norm": 0.5, "kl": [1e-5]}
    yield said((6, kl_alone), beta=1.0), {4: ["the KL term alone moves the policy"]}
    yield said((1, {"loss": 0.0}), (4, _NO_SIGNAL)), {5: ["first 4 generations"]}
    yield said((4, _NO_SIGNAL), (4, _NO_GRADIENT)), {4: ["no learning signal"], 8: ["no gradient"]}

    # No gradient: when the shares of the groups that have a signal add up to four, or to sixteen under fp16.
    numbers = "In numbers: the optimizer has 1 of 1 parameter tensors; gradient checkpointing is off; "
    none = {4: ["WARNING: no gradient", "in all 4 logged steps, with rewards that differ. ", numbers, "inputs are on"]}
    yield said((6, _NO_GRADIENT)), none
    yield said((6, {**without_share, "reward_std": [1e-6]})), {4: ["no gradient"]}
    yield said((6, {**_NO_GRADIENT, "reward_std": [1e-6]})), {4: ["no gradient"]}
    yield said((10, {**without_share, "reward_std": [0.0, 0.3]})), {8: ["no gradient"]}
    yield said((10, {**_NO_GRADIENT, "frac_reward_zero_std": [0.0, 1.0]})), {8: ["in all 8 logged steps"]}
    yield said((18, _NO_GRADIENT), fp16=True), {16: ["in all 16 logged steps"]}
    yield said((6, _NO_GRADIENT), is_deepspeed_enabled=True), {4: ["differ. In numbers: gradient checkpointing"]}
    cut = {**_NO_GRADIENT, "completions/clipped_ratio": [1.0]}
    yield said((6, cut), mask_truncated_completions=True), {4: ["differ; every completion was cut off, and"]}
    yield said((6, cut)), {4: ["with rewards that differ. In"]}
    half_cut = {**cut, "completions/clipped_ratio": [1.0, 0.0]}
    yield said((6, half_cut), mask_truncated_completions=True), {4: ["with rewards that differ. In"]}
    state = ["gradient checkpointing is on; gradients of the inputs are off"]
    yield said((6, _NO_GRADIENT), model=_frozen(), **checkpointing), {4: state}
    hooked = _frozen()
    hooked.embedding.register_forward_hook(lambda module, args, output: None)
    yield said((6, _NO_GRADIENT), model=hooked), {4: ["gradients of the inputs are on"]}
    yield (
        said((6, _NO_GRADIENT), model=torch.nn.Linear(1, 1)),
        {4: ["of 2 parameter", "gradients of the inputs are on"]},
    )
    nothing = {1: ["no gradient: nothing was trainable when training began. In numbers: the optimizer has 0 of 1"]}
    yield said((6, _LEARNING), optimizer=_NO_PARAMETERS), nothing
    if "peft" in sys.modules:
        frozen = _with_adapter().requires_grad_(False)
        state = ["0 of 7 parameter tensors; of adapter default, 4 of 4 are frozen; "]
        yield said((1, _LEARNING), model=frozen, optimizer=_NO_PARAMETERS), {1: state}


def _frozen() -> Any:
    import torch

    return _with_embedding(torch.nn.Module()).requires_grad_(False)


def _check_healthy(said: Callable[..., _Messages]) -> None:
    """Raise if anything is said of a run that is healthy, or of which nothing is proven."""
    batch = {"scale_rewards": "batch"}
    sums = {"multi_objective_aggregation": "normalize_then_sum"}
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}
    for times, values, settings in (
        (6, _LEARNING, {}),
        (6, _LEARNING, {"optimizer": _NO_PARAMETERS, "is_deepspeed_enabled": True}),
        # A loss besides the rewards, which are equal.
        (6, {**_NO_SIGNAL, "loss": -0.1, "grad_norm": 0.5}, {}),
        (6, {**_NO_SIGNAL, "loss": _SHOWN_AS_ZERO}, {}),
        (6, {**_NO_SIGNAL, "loss": 1.55e-4, "kl": [1e-5]}, {"beta": 1.0}),
        # Another rank; an evaluation.
        (6, _NO_SIGNAL, {"main": False}),
        (6, {"eval_loss": 0.0, "reward_std": [0.0]}, {}),
        # Not a loss of 0, a signal or a gradient.
        (3, {**_NO_SIGNAL, "grad_norm": 0.5}, {}),
        (4, {**_ZERO, "loss": _SHOWN_AS_ZERO}, {}),
        (4, {**_ZERO, "loss": -0.1}, {}),
        (4, {**_ZERO, "kl": [5.1e-4]}, {"beta": 1.0}),
        (4, {**_ZERO, "grad_norm": math.inf}, {}),
        (6, {**_ZERO, "grad_norm": -1.0}, {}),
        (4, {**_ZERO, "grad_norm": 1e-6}, {}),
        (4, {"loss": 0.0, "reward_std": [0.3]}, {}),
        (4, _ZERO, {"model": _frozen(), **checkpointing}),
        # The share of the batch, or of no generation.
        (6, _NO_GRADIENT, batch),
        (6, _NO_GRADIENT, sums),
        (6, {"loss": 0.0, "grad_norm": 0.0}, {}),
    ):
        if messages := said((times, values), **settings):
            raise AssertionError(f"of a healthy run, {values} with {settings}, it was said: {messages}")
    for entries in [((1, _LEARNING), (6, _NO_SIGNAL)), ((3, _NO_GRADIENT), (1, _LEARNING), (6, _NO_GRADIENT))]:
        if messages := said(*entries):
            raise AssertionError(f"of a run that was healthy once, {entries}, it was said: {messages}")


def _with_adapter(*modules: str) -> Any:
    """Return a model with a trained LoRA on these modules. Half of each matrix B is 0."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = _with_embedding(torch.nn.Module())
    base.q, base.lm_head = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    base.get_output_embeddings = lambda: base.lm_head
    model = get_peft_model(base, LoraConfig(r=1, target_modules=list(modules or ("q", "lm_head"))))
    for name, tensor in model.named_parameters():
        if ".lora_B." in name:
            tensor.data[0] = 1.0
    return model


def _check_adapters(said: Callable[..., _Messages], fate: Callable[..., Any]) -> None:
    """Raise unless exactly what became of an adapter is said of it."""
    import torch

    def expect(found: tuple[Any, str], *parts: str) -> None:
        if bool(found[1]) != bool(parts) or not all(part in found[1] for part in parts):
            raise AssertionError(f"of an adapter it was said: {found[1]!r}. Expected: {parts}")

    def initialise(model: Any, *modules: str) -> None:
        for name, tensor in model.named_parameters():
            if any(f".{module}.lora_" in name for module in modules):
                tensor.data.zero_()

    config = object()
    trained = _with_adapter()
    expect(fate(trained, config), "WARNING: peft_config was given with", "its 4 tensors were put aside")
    expect(fate(trained, config, lambda: torch.nn.Sequential(trained)), "its 4 tensors were put aside")
    expect(fate(trained, config, lambda: torch.nn.Linear(1, 1)), "its 4 tensors were merged into the base model")
    expect(fate(trained, config, main=False))
    expect(fate(trained))
    expect(fate(trained, config, lambda: initialise(trained, "q")), "were initialised again in 2 cases, and")
    # One of its matrices B is 0 now.
    expect(fate(trained, config))
    expect(fate(torch.nn.Linear(1, 1), config))

    frozen = _with_adapter().requires_grad_(False)
    expect(fate(frozen))
    frozen.peft_config["default"].inference_mode = True
    expect(fate(frozen, config), "put aside")
    trainer, message = fate(frozen, optimizer=_NO_PARAMETERS)
    expect(
        (trainer, message), "WARNING: 0 of 7 parameter tensors are trainable, since the adapter (default) was loaded"
    )
    if messages := said((1, _LEARNING), trainer=trainer):
        raise AssertionError(f"of an adapter that was loaded for inference it was said again: {messages}")
    both, of_q = _with_adapter(), _with_adapter("q")
    head = "WARNING: the Liger loss goes past an adapter: no gradient reaches the 2 adapter tensors of the LM head."
    expect(fate(both, use_liger_loss=True), head)
    expect(fate(both, use_liger_kernel=True), head)
    expect(fate(of_q, use_liger_loss=True))
    expect(fate(torch.nn.Linear(1, 1), use_liger_loss=True))
    of_q.peft_config["prompt"] = SimpleNamespace(is_prompt_learning=True)
    expect(fate(of_q, use_liger_loss=True), "past an adapter: no gradient reaches prompt learning (prompt).")
    both.base_model.model.lm_head.requires_grad_(False)
    expect(fate(both, use_liger_loss=True))
    both.peft_config["default"].inference_mode = True
    expect(fate(both))
