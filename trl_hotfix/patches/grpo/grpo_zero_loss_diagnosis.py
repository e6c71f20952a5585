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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
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


@wrapper
def say_why_the_loss_is_zero(call: Call) -> Any:
    """Examine each log entry of a training step until one case is proven."""
    trainer = call.trainer
    run = _runs.setdefault(trainer, _Run())
    logs = call["logs"]
    message = None
    # The entry at the end of a run has no loss, that of an evaluation has an eval_loss, a callback's own has neither.
    if trainer.accelerator.is_main_process and "loss" in logs:
        # Up to 0.15 the metrics are not kept by mode.
        message = _diagnose(trainer, run, logs, trainer._metrics.get("train", trainer._metrics))
    result = call()
    if message is not None and (case := message.partition(":")[0]) not in run.reported:
        run.reported.add(case)
        call.act()
        _log.log(logging.INFO if case == "no bug" else logging.WARNING, "GRPO: %s", message)
    return result


@wrapper
def say_what_became_of_the_adapter(call: Call) -> Any:
    """Compare the model that was given with the one that the trainer has after ``__init__``."""
    trainer, model = call.trainer, call["model"]
    before: dict[str, Any] = {}
    messages = []
    if _is_peft(model):
        if call["peft_config"] is not None:
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
                _runs.setdefault(trainer, _Run()).reported.add("no gradient")
    result = call()
    if before:
        messages.append(_lost(before, model, trainer.model))
    liger = getattr(trainer, "use_liger_loss", False) or getattr(trainer, "use_liger_kernel", False)
    if liger and _is_peft(trainer.model):
        messages += [
            f"the Liger loss goes past an adapter: no gradient reaches {adapter}. Train without Liger, or without it"
            for adapter in _missed(trainer.model)
        ]
    for message in messages:
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning("GRPO: %s", message)
    return result


def the_case_is_named(module: ModuleType) -> Outcome:
    """Log a step of a run in which nothing was trainable, and count the lines that say so."""
    import torch

    trainer = stub_grpo_trainer(module, beta=0.0, fp16=False, gradient_checkpointing=False)
    vars(trainer).update(
        model=torch.nn.Module(),
        optimizer=SimpleNamespace(param_groups=[]),
        state=SimpleNamespace(epoch=None, log_history=[], global_step=1, num_input_tokens_seen=0),
        callback_handler=SimpleNamespace(on_log=lambda args, state, control, logs: control),
        _metrics=defaultdict(dict),
    )
    lines: list[str] = []
    with shadowed(_log, "log", lambda level, message, *values: lines.append(message % values)):
        trainer.log({"loss": 0.0})
    return judge(sum("nothing was trainable when training began" in line for line in lines), right=1, wrong=0)
