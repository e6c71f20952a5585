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

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import act, argument, judge
from ..model import Outcome
from ..testing import stub_grpo_trainer

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


def _no_bug(zeros: int, loss: float, grad_norm: float, beta: float, kl: float | None) -> str | None:
    """Return the message after three zeros in a row. If the KL term is large enough to show, 0 has another reason."""
    if zeros < 3 or beta * (kl or 0.0) > 10 * _SHOWN_AS_ZERO:
        return None
    value = "0, as beta is 0" if kl is None else f"beta * KL = {beta:g} * {kl:.3g} = {beta * kl:.3g}"
    return (
        f"no bug: the loss is {abs(loss):.3g}, grad_norm is {grad_norm:.3g}, so the policy is trained. As long as it "
        "is the one that sampled (num_iterations=1), pi/pi_old is 1 and the advantages of a group add up to 0: where "
        'each sequence weighs the same (loss_type="grpo", TRL before 0.16) or all are equally long, the loss as a '
        f"number is {value}. Its gradient is not 0. Judge the run by its rewards, not by its loss"
    )


def _no_signal(generations: int, beta: float, rewards: Mapping[str, float]) -> str | None:
    if generations < _PATIENCE:
        return None
    named = ", ".join(f"{name} (mean {mean:.4g})" for name, mean in rewards.items()) or "the reward functions"
    consequence = "the KL term alone moves the policy" if beta else "nothing is trained"
    return (
        f"no learning signal so far: in each of the first {generations} generations all completions of every group got "
        f"the same reward, so all advantages are 0 and {consequence}. Look at what these give to completions of one "
        f"prompt: {named}"
    )


def _no_gradient(proven: bool, entries: int, optimized: int | None, state: str, masked: bool) -> str | None:
    if optimized != 0 and not proven:
        return None
    reason = f"grad_norm was 0 in all {entries} logged steps, with rewards that differ"
    if masked:
        reason += "; every completion was cut off, and mask_truncated_completions=True leaves those out"
    if optimized == 0:
        reason = "nothing was trainable when training began"
    return f"no gradient: {reason}. In numbers: {state}. What is to be trained needs requires_grad=True before train()"


def _lost(tensors: int, changed: int, merged: bool) -> str | None:
    """Report an adapter of ``tensors``, of which ``changed`` are not the same after ``peft_config`` was applied."""
    if not tensors:
        return None
    fate = f"its {tensors} tensors were put aside, and the run starts without them"
    if changed:
        fate = f"{changed} of its {tensors} tensors were initialised again, and what they had learned is lost"
    if merged:
        fate = f"its {tensors} tensors were merged into the base model, to which the adapter that is saved now belongs"
    return (
        "peft_config was given with a model that has a trained adapter already: "
        f"{fate}. To go on training the adapter, leave peft_config out"
    )


def _missed(head: int, prompt: Sequence[str]) -> str | None:
    """Report ``head`` adapter tensors of the LM head, or the prompt-learning adapters, under the Liger loss."""
    if not head and not prompt:
        return None
    adapters = (
        f"the {head} adapter tensors of the LM head get" if head else f"prompt learning ({', '.join(prompt)}) gets"
    )
    return (
        f"the Liger loss goes past an adapter: {adapters} no gradient from it. Train without Liger, or without that one"
    )


def _not_trainable(tensors: int, adapters: Sequence[str]) -> str | None:
    if not adapters:
        return None
    return (
        f"0 of {tensors} parameter tensors are trainable, since the adapter ({', '.join(adapters)}) was loaded for "
        "inference. Load it with PeftModel.from_pretrained(..., is_trainable=True)"
    )


def _is_peft(model: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _adapter(model: Any) -> dict[str, Any]:
    """Copy the tensors of the active adapters. Return none if B is 0, as LoRA starts it, or is not on this rank."""
    marks = [f".{name}." for name in model.active_adapters]
    tensors = {name: tensor for name, tensor in model.named_parameters() if any(mark in name for mark in marks)}
    if not all(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name):
        return {}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _inputs_need_grad(model: Any) -> bool:
    """Return whether the outputs of the embedding need gradients, as checkpointing of frozen layers requires."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    return bool(embedding._forward_hooks) or any(weight.requires_grad for weight in embedding.parameters())


def _state(trainer: Any, tensors: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts that explain a missing gradient."""
    model = trainer.model
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
    if (optimizer := getattr(trainer, "optimizer", None)) is None:
        return sum(bool(tensor.requires_grad) for tensor in trainer.model.parameters())
    return sum(map(len, (group["params"] for group in optimizer.param_groups)))


def _is_cut_off(trainer: Any) -> bool:
    """Detect reentrant checkpointing over inputs without gradients, where some adapters do not train (TRL 2848)."""
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant") is not False
    return (
        trainer.args.gradient_checkpointing
        and reentrant
        and _is_peft(trainer.model)
        and not _inputs_need_grad(trainer.model)
    )


def _share_without_signal(trainer: Any, metrics: Mapping[str, Sequence[float]]) -> float | None:
    """Return the share of the groups (of the generations up to TRL 0.17) without a signal; None if it is unknown."""
    deviations = metrics.get("reward_std") or [math.nan]
    shares = metrics.get("frac_reward_zero_std") or [float(deviation < 1e-6) for deviation in deviations]
    if max(deviations) < 1e-6 or min(shares) == 1.0:
        return 1.0
    of_batch = getattr(trainer.args, "scale_rewards", None) == "batch"
    of_batch = of_batch or getattr(trainer.args, "multi_objective_aggregation", None) == "normalize_then_sum"
    return None if of_batch or any(map(math.isnan, deviations)) else sum(shares) / len(shares)


def _diagnose(trainer: Any, run: _Run, logs: Mapping[str, Any], metrics: Mapping[str, Sequence[float]]) -> str | None:
    """Return the case if this log entry completes its proof. ``metrics`` has a value for each generation in it."""
    mean = {name: sum(values) / len(values) for name, values in metrics.items() if values}
    loss, grad_norm = logs["loss"], logs.get("grad_norm", math.nan)
    share = _share_without_signal(trainer, metrics)
    patience = 4 * _PATIENCE if trainer.args.fp16 else _PATIENCE
    has_gradient = math.isfinite(grad_norm) and grad_norm > 1e-6
    run.entries += 1
    # With equal rewards GRPO's loss is the KL term. Sums over tokens and over sequences weigh it differently.
    explained = abs(loss) < 10 * trainer.beta * mean.get("kl", 0.0) + _SHOWN_AS_ZERO
    if share == 1.0 and explained:
        run.generations_without_signal += len(metrics.get("reward_std", ()))
    elif "reward_std" in mean:
        run.had_signal = True
    if grad_norm > 0:
        run.had_gradient = True
    elif grad_norm == 0 and share is not None:
        run.signal_without_gradient += 1.0 - share
    if share is not None:
        zero = abs(loss) < _SHOWN_AS_ZERO and has_gradient and share < 1.0
        run.zeros = run.zeros + 1 if zero else 0

    proven = not run.had_gradient and run.signal_without_gradient >= patience
    if "no gradient" not in run.reported and (run.entries == 1 or proven):
        tensors = dict(trainer.model.named_parameters())
        masked = (
            getattr(trainer.args, "mask_truncated_completions", False) and mean.get("completions/clipped_ratio") == 1
        )
        state = "; ".join(_state(trainer, tensors))
        if message := _no_gradient(proven, run.entries, _optimized(trainer), state, masked):
            return message
    rewards = {
        name.removeprefix("rewards/").removesuffix("/mean"): value
        for name, value in mean.items()
        if name.startswith("rewards/") and not name.endswith("/std")
    }
    if not run.had_signal and (message := _no_signal(run.generations_without_signal, trainer.beta, rewards)):
        return message
    message = _no_bug(run.zeros, loss, grad_norm, trainer.beta, mean.get("kl"))
    return None if message is None or _is_cut_off(trainer) else message


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
        _log.log(logging.INFO if message.startswith("no bug") else logging.WARNING, "GRPO: %s", message)
    return result


def say_what_became_of_the_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compare the model that was given with the one that the trainer has after ``__init__``."""
    model = argument(wrapped, args, kwargs, "model")
    added = argument(wrapped, args, kwargs, "peft_config") is not None
    before: dict[str, Any] = {}
    messages: list[str | None] = []
    if _is_peft(model):
        before = _adapter(model) if added else {}
        if not added and not any(tensor.requires_grad for tensor in model.parameters()):
            inference = [name for name in model.active_adapters if model.peft_config[name].inference_mode]
            messages.append(_not_trainable(sum(1 for _ in model.parameters()), inference))
    result = wrapped(*args, **kwargs)
    if before:
        merged = all(submodule is not model for submodule in instance.model.modules())
        after = dict(model.named_parameters())
        changed = sum(name not in after or not after[name].equal(old.to(after[name])) for name, old in before.items())
        messages.append(_lost(len(before), changed, merged))
    liger = getattr(instance, "use_liger_loss", False) or getattr(instance, "use_liger_kernel", False)
    if liger and _is_peft(instance.model):
        from peft.tuners.tuners_utils import BaseTunerLayer

        head: Any = instance.model.get_output_embeddings()
        weights = list(head.parameters()) if isinstance(head, BaseTunerLayer) else []
        tensors = sum(weight.requires_grad for weight in weights)
        prompt = [name for name, config in instance.model.peft_config.items() if config.is_prompt_learning]
        messages.append(_missed(tensors, prompt))
    for message in filter(None, messages):
        act()
        if instance.accelerator.is_main_process:
            _log.warning("GRPO: %s", message)
        # If the model was given frozen, "no gradient" follows from that and would be reported twice.
        if message.startswith("0 of"):
            _runs.setdefault(instance, _Run()).reported.add("no gradient")
    return result


def the_case_is_named(module: ModuleType) -> Outcome:
    """Count the runs whose cases are named exactly, of five runs of ten or twenty log entries.

    Healthy runs must get no message: one whose loss is not 0, one under ZeRO-3, whose optimizer shows no parameter, one
    with a loss besides its rewards, which are equal, and a rank that is not the main process.
    """
    import torch

    class Metrics(dict[str, list[float]]):
        """Metrics that are also those of each mode, for releases that keep them by mode and for those that do not."""

        def __missing__(self, mode: str) -> Metrics:
            return self

    logged: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return False

    def messages_of(*entries: tuple[float, float, float], main: bool = True, **attributes: Any) -> list[str]:
        """Return the messages of a run that logs each entry ten times: loss, grad_norm, deviation of the rewards."""
        trainer = stub_grpo_trainer(module, beta=0.0, fp16=False)
        vars(trainer).update(attributes)
        trainer.accelerator.is_main_process = main
        trainer.model = torch.nn.Embedding(1, 1)
        trainer.model.get_input_embeddings = lambda: trainer.model
        trainer.state = SimpleNamespace(epoch=None, log_history=[], global_step=1, num_input_tokens_seen=0)
        trainer.callback_handler = SimpleNamespace(on_log=lambda args, state, control, logs: control)
        logged.clear()
        for loss, grad_norm, deviation in [entry for entry in entries for _ in range(_PATIENCE)]:
            metrics = {
                "reward_std": [deviation],
                "frac_reward_zero_std": [float(deviation == 0)],
                "rewards/r/mean": [0.5],
            }
            trainer._metrics = Metrics(metrics)
            trainer.log({"loss": loss, "grad_norm": grad_norm, "learning_rate": 1e-6})
        return logged.copy()

    level = _log.level
    _log.setLevel(logging.INFO)
    _log.addFilter(keep)
    try:
        learning, no_signal, no_gradient = (0.1, 0.5, 0.3), (0.0, 0.0, 0.0), (0.0, 0.0, 0.3)
        no_parameters = SimpleNamespace(param_groups=[{"params": []}])
        healthy = [
            *messages_of(learning),
            *messages_of(learning, optimizer=no_parameters, is_deepspeed_enabled=True),
            *messages_of((0.1, 0.5, 0.0)),
            *messages_of(no_signal, main=False),
        ]
        cases = [
            (messages_of((0.0, 0.5, 0.3)), ["no bug"]),
            (messages_of(no_signal), ["no learning signal so far"]),
            (messages_of(no_gradient), ["no gradient"]),
            (messages_of(learning, optimizer=no_parameters), ["no gradient"]),
            (messages_of(no_signal, no_gradient), ["no learning signal so far", "no gradient"]),
        ]
    finally:
        _log.removeFilter(keep)
        _log.setLevel(level)
    if healthy:
        raise AssertionError(f"of healthy runs it was said: {healthy}")
    named = [([message.split(":")[1].strip() for message in messages], expected) for messages, expected in cases]
    correct = sum(messages == expected for messages, expected in named)
    return judge(correct, right=len(cases), wrong=0, messages=sum(len(messages) for messages, _ in cases))
