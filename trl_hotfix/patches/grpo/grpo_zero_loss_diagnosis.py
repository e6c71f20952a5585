"""A GRPO loss of 0.0 looks the same in a healthy run and in one that learns nothing; one log line names the case.

- No bug (TRL issues 2703, 3452): the ratio of the probabilities is 1, and the advantages of a group add up to 0. The
  loss as a number is beta * KL (arXiv:2402.03300, equation 3); its gradient is the policy gradient.
- No signal: the rewards of each group are equal, in each of the first ten generations. The loss must not be above what
  beta * KL explains: MiniLLM has a loss besides the rewards.
- No gradient (3926): ``grad_norm`` was always 0. A healthy step logs 0 with at most the probability ``share`` that a
  group has no signal. If the sum of ``1 - share`` is ten, the probability of such a run is at most ``exp(-10)``. Under
  fp16 it takes forty: the first steps are skipped until the loss scale fits.
- An adapter that is not trained as intended: ``peft_config`` on top of a ``PeftModel`` (3882, 4713), an adapter outside
  the path of the Liger loss (5977, 6186), a ``PeftModel`` that was loaded for inference.
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
_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


@dataclass(slots=True)
class _Run:
    """The facts about a run that its log has shown so far."""

    reported: set[str] = field(default_factory=set)
    entries: int = 0
    zeros: int = 0  # logged losses of 0 in a row, with a signal and a gradient
    had_signal: bool = False
    generations_without_signal: int = 0
    had_gradient: bool = False
    signal_without_gradient: float = 0.0  # the sum of 1 - share over the log entries whose grad_norm is 0


def _no_signal(generations: int, beta: float, mean: Mapping[str, float]) -> str:
    consequence = "the KL term alone moves the policy" if beta else "nothing is trained"
    names = [name for name in mean if name.startswith("rewards/") and not name.endswith("/std")]
    rewards = [f"{name.removeprefix('rewards/').removesuffix('/mean')} (mean {mean[name]:.4g})" for name in names]
    return (
        f"no learning signal so far: in each of the first {generations} generations all completions of every group got "
        f"the same reward, so all advantages are 0 and {consequence}. Look at what the reward functions give to "
        f"completions of one prompt: {', '.join(rewards)}"
    )


def _no_gradient(trainer: Any, run: _Run, mean: Mapping[str, float]) -> str | None:
    """Return what explains a missing gradient, or None if it is not proven that it is missing."""
    # The optimizer has what was trainable when training began. That of DeepSpeed does not show it.
    shows = not getattr(trainer, "is_deepspeed_enabled", False)
    optimized = sum(len(group["params"]) for group in trainer.optimizer.param_groups) if shows else None
    if optimized == 0:  # PEFT may have made it trainable since, when the reference was computed.
        reason = "nothing was trainable when training began"
    elif not run.had_gradient and run.signal_without_gradient >= _PATIENCE * (4 if trainer.args.fp16 else 1):
        reason = f"grad_norm was 0 in all {run.entries} logged steps, with rewards that differ"
        if getattr(trainer.args, "mask_truncated_completions", False) and mean.get("completions/clipped_ratio") == 1:
            reason += "; every completion was cut off, and mask_truncated_completions=True leaves those out"
    else:
        return None
    model = trainer.model
    tensors = dict(model.named_parameters())
    facts = [f"the optimizer has {optimized} of {len(tensors)} parameter tensors"] if shows else []
    for adapter in model.active_adapters if _is_peft(model) else ():
        trainable = [tensor.requires_grad for name, tensor in tensors.items() if f".{adapter}." in name]
        facts.append(f"of adapter {adapter}, {trainable.count(False)} of {len(trainable)} are frozen")
    facts.append(f"gradient checkpointing is {'on' if trainer.args.gradient_checkpointing else 'off'}")
    facts.append(f"gradients of the inputs are {'on' if _inputs_need_grad(model) else 'off'}")
    state = "; ".join(facts)
    return f"no gradient: {reason}. In numbers: {state}. Set requires_grad=True before train() on what should train"


def _lost(before: Mapping[str, Any], given: Any, own: Any) -> str:
    """Report an adapter, whose tensors were ``before`` when ``peft_config`` was applied to the model that has it."""
    fate = "put aside, and the run starts without them"
    after = dict(given.named_parameters())
    if all(module is not given for module in own.modules()):
        fate = "merged into the base model, to which the adapter that is saved now belongs"
    elif changed := sum(not after[name].equal(tensor.to(after[name])) for name, tensor in before.items()):
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
    return isinstance(model, getattr(sys.modules.get("peft"), "PeftModel", ()))


def _adapter(model: Any) -> dict[str, Any]:
    """Copy the tensors of the active adapters. Return none if B is 0, as LoRA starts it, or is not on this rank."""
    marks = [f".{name}." for name in model.active_adapters]
    tensors = {name: tensor for name, tensor in model.named_parameters() if any(mark in name for mark in marks)}
    is_trained = all(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)
    return {name: tensor.data.clone() for name, tensor in tensors.items()} if is_trained else {}


def _inputs_need_grad(model: Any) -> bool:
    """Return whether the outputs of the embedding need gradients, as checkpointing of frozen layers requires."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    return bool(embedding._forward_hooks) or any(weight.requires_grad for weight in embedding.parameters())


def _is_cut_off(trainer: Any) -> bool:
    """Detect reentrant checkpointing over inputs without gradients, where some adapters do not train (TRL 2848)."""
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant") is not False
    return trainer.args.gradient_checkpointing and reentrant and not _inputs_need_grad(trainer.model)


def _share_without_signal(trainer: Any, metrics: Mapping[str, Sequence[float]]) -> float | None:
    """Return the share of the groups (of the generations up to TRL 0.17) without a signal; None if it is unknown."""
    if not (deviations := metrics.get("reward_std")):  # No generation belongs to this log entry.
        return None
    # Up to 0.17 there is no share. From 0.27 on it is the deviation of the batch.
    shares = metrics.get("frac_reward_zero_std") or [float(deviation < 1e-6) for deviation in deviations]
    if max(deviations) < 1e-6 or min(shares) == 1.0:
        return 1.0
    settings = {getattr(trainer.args, name, None) for name in ("scale_rewards", "multi_objective_aggregation")}
    return None if settings & {"batch", "normalize_then_sum"} else sum(shares) / len(shares)


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
    run.had_gradient = run.had_gradient or grad_norm > 0
    if share is not None:
        run.signal_without_gradient += 1.0 - share if grad_norm == 0 else 0.0
        zero = abs(loss) < _SHOWN_AS_ZERO and 1e-6 < grad_norm < math.inf and share < 1.0
        run.zeros = run.zeros + 1 if zero else 0
    if "no gradient" not in run.reported and (message := _no_gradient(trainer, run, mean)):
        return message
    if not run.had_signal and run.generations_without_signal >= _PATIENCE:
        return _no_signal(run.generations_without_signal, beta, mean)
    # If the KL term is large enough to show, 0 has another reason.
    is_explained = run.zeros >= 3 and beta * kl <= 10 * _SHOWN_AS_ZERO and not _is_cut_off(trainer)
    if not is_explained:
        return None
    return (
        f"no bug: the loss is {abs(loss):.3g}, grad_norm is {grad_norm:.3g}, so the policy is trained. As long as it "
        "is the one that sampled (num_iterations=1), pi/pi_old is 1 and the advantages of a group add up to 0: where "
        'each sequence weighs the same (loss_type="grpo", TRL before 0.16) or all are equally long, the loss as a '
        f"number is beta * KL = {beta:g} * {kl:.3g} = {beta * kl:.3g}. Its gradient is not 0. Judge the run by its "
        "rewards, not by its loss"
    )


@wrapper
def say_why_the_loss_is_zero(call: Call) -> Any:
    """Examine each log entry of a training step until one case is proven."""
    trainer, logs, message = call.trainer, call["logs"], None
    run = _runs.setdefault(trainer, _Run())
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
def say_what_became_of_the_adapter(call: Call) -> None:
    """Compare the model that was given with the one that the trainer has after ``__init__``."""
    trainer, model, before, messages = call.trainer, call["model"], {}, []
    if _is_peft(model) and call["peft_config"] is not None:
        before = _adapter(model)
    elif _is_peft(model) and not any(tensor.requires_grad for tensor in model.parameters()):
        adapters = [name for name in model.active_adapters if model.peft_config[name].inference_mode]
        if adapters:
            messages.append(
                f"0 of {len(list(model.parameters()))} parameter tensors are trainable, since the adapter "
                f"({', '.join(adapters)}) was loaded for inference. Load it with "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
            # That follows from it, and would be reported twice.
            _runs.setdefault(trainer, _Run()).reported.add("no gradient")
    call()
    if before:
        messages.append(_lost(before, model, trainer.model))
    liger = getattr(trainer, "use_liger_loss", False) or getattr(trainer, "use_liger_kernel", False)
    if liger and _is_peft(trainer.model):
        message = "the Liger loss goes past an adapter: no gradient reaches {}. Train without Liger, or without it"
        messages += map(message.format, _missed(trainer.model))
    for message in messages:
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning("GRPO: %s", message)


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
