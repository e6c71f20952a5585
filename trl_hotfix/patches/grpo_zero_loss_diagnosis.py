"""A GRPO run whose loss is 0.0 looks the same whether all is well or nothing is learned. This says which it is.

Nothing is changed: ``log`` and ``__init__`` run as they are, and one line tells the case, on the main process, once a
run, from what the trainer has logged anyway. No collective operation is called.

- No bug (TRL issues 2703, 3452): the ratio of the probabilities is 1 while the policy is the one that sampled, and the
  advantages of a group add up to 0. The value of the loss is then beta * KL (DeepSeekMath, arXiv:2402.03300, equation
  3); its gradient is the policy gradient. transformers 4 prints it rounded to four digits.
- No signal: all rewards of each group are equal, so all advantages are 0.
- No gradient: ``grad_norm`` is 0 although there is a signal, e.g. frozen adapters (issue 3926).
- Adapters that do not do what they were given for: ``peft_config`` on top of a ``PeftModel`` (3882, 4713), an adapter
  beside the path of the Liger loss (5977, 6186), a ``PeftModel`` loaded for inference.

When one logged step proves nothing, it waits, for a hard task has steps without a signal:

- ``reward_std`` is no witness from 0.27 on, where it is that of the batch; ``frac_reward_zero_std``, the share of the
  groups without a signal, is logged from 0.18 on. Both are means of what each generation noted, and neither is
  negative: a mean of 0 (of 1) is 0 (is 1) in each. "No signal" takes ten generations, the first of the run.
- ``grad_norm`` is that of the last step since the log before, and with ``steps_per_generation`` of a part of a
  generation: a healthy one is 0 with at most the probability ``share`` that a group has no signal. "No gradient" waits
  until the sum of ``1 - share`` is ten with never a gradient: at most ``prod(share) <= exp(-10)``. Under fp16, whose
  first steps are skipped until the loss scale fits (DeepSpeed notes 0 for them), forty. A model with no trainable
  tensor when training began needs no proof: PEFT thaws a frozen adapter after it was disabled for the reference, so
  that grad_norm is not 0, but the optimizer does not have it.
- With ``scale_rewards="batch"`` or ``normalize_then_sum`` the share is that of the batch, and tells only "none".

A step without ``grad_norm`` (``max_grad_norm=0``, some engines) or with an infinite one says nothing of gradients.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import argument, judge
from ..model import Outcome
from ..stubs import stub_grpo_trainer

_PATIENCE = 10
_SHOWN_AS_ZERO = 5e-5

_log = logging.getLogger("trl_hotfix")


@dataclass(slots=True)
class _Run:
    """What is known of a run so far."""

    over: bool = False
    zeros: int = 0  # logged losses of 0 in a row, with a signal and a gradient
    mute: int = 0  # generations without a signal; -1 as soon as there was one
    still: float = 0.0  # signal that came with no gradient; -1 as soon as there was one
    entries: int = 0


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


def _no_bug(zeros: int, loss: float, grad_norm: float, beta: float, kl: float | None) -> str | None:
    """Three in a row: a single one may be chance. With a KL term that ought to show, 0 has another reason."""
    if zeros < 3 or beta * (kl or 0.0) > 10 * _SHOWN_AS_ZERO:
        return None
    left = "0, as beta is 0" if kl is None else f"beta * KL = {beta:g} * {kl:.3g} = {beta * kl:.3g}"
    return (
        f"no bug: the loss is {abs(loss):.3g}, grad_norm is {grad_norm:.3g}, so the policy is trained. As long as it "
        "is the one that sampled (num_iterations=1), pi/pi_old is 1 and the advantages of a group add up to 0: where "
        'each sequence weighs the same (loss_type="grpo", TRL before 0.16) or all are equally long, the loss as a '
        f"number is {left}. Its gradient is not 0. Judge the run by its rewards, not by its loss"
    )


def _no_signal(mute: int, beta: float, rewards: Mapping[str, float]) -> str | None:
    if mute < _PATIENCE:
        return None
    named = ", ".join(f"{name} (mean {mean:.4g})" for name, mean in rewards.items()) or "the reward functions"
    rest = "the KL term alone moves the policy" if beta else "nothing is trained"
    return (
        f"no learning signal: in each of the first {mute} generations all completions of every group got the same "
        f"reward, so all advantages are 0 and {rest}. Look at what these give to completions of one prompt: {named}"
    )


def _no_gradient(still: float, patience: int, entries: int, optimized: int, state: str, masked: bool) -> str | None:
    if optimized and still < patience:
        return None
    why = f"grad_norm was 0 in all {entries} logged steps, with rewards that differ"
    if masked:
        why += "; every completion was cut off, and mask_truncated_completions=True leaves those out"
    if not optimized:
        why = "nothing was trainable when training began"
    return f"no gradient: {why}. In numbers: {state}. What is to be trained needs requires_grad=True before train()"


def _lost(tensors: int, changed: int, merged: bool) -> str | None:
    """``changed`` of the ``tensors`` of an adapter are others after ``peft_config`` was applied to its model."""
    if not tensors:
        return None
    what = f"its {tensors} tensors were put aside, and the run starts without them"
    if changed:
        what = f"{changed} of its {tensors} tensors were initialised again, and what they had learned is lost"
    if merged:
        what = f"its {tensors} tensors were merged into the base model, to which the adapter that is saved now belongs"
    return (
        "peft_config was given with a model that has a trained adapter already: "
        f"{what}. To go on training the adapter, leave peft_config out"
    )


def _missed(head: int, prompt: Sequence[str]) -> str | None:
    """``head`` adapter tensors of the LM head, and the names of prompt-learning adapters, under the Liger loss."""
    if not head and not prompt:
        return None
    what = f"the {head} adapter tensors of the LM head get" if head else f"prompt learning ({', '.join(prompt)}) gets"
    return f"the Liger loss goes past an adapter: {what} no gradient from it. Train without Liger, or without that one"


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
    """Copies of the tensors of the active adapters; none if they are as LoRA made them, with B = 0 (or not here)."""
    marks = [f".{name}." for name in model.active_adapters]
    found = {name: tensor for name, tensor in model.named_parameters() if any(mark in name for mark in marks)}
    if not all(bool(tensor.any()) for name, tensor in found.items() if ".lora_B." in name):
        return {}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _inputs_need_grad(model: Any) -> bool:
    """Whether something makes the outputs of the embedding need gradients, as checkpointing of frozen layers wants."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    return bool(embedding._forward_hooks) or any(each.requires_grad for each in embedding.parameters())


def _state(trainer: Any, tensors: Mapping[str, Any]) -> Iterator[str]:
    model = trainer.model
    yield f"the optimizer has {_optimized(trainer)} of {len(tensors)} parameter tensors"
    for adapter in model.active_adapters if _is_peft(model) else ():
        its = [each.requires_grad for name, each in tensors.items() if f".{adapter}." in name]
        yield f"of adapter {adapter}, {its.count(False)} of {len(its)} are frozen"
    yield f"gradient checkpointing is {'on' if trainer.args.gradient_checkpointing else 'off'}"
    yield f"gradients of the inputs are {'on' if _inputs_need_grad(model) else 'off'}"


def _optimized(trainer: Any) -> int:
    """Tensors in the optimizer: those that were trainable when training began."""
    if (optimizer := getattr(trainer, "optimizer", None)) is None:
        return sum(each.requires_grad for each in trainer.model.parameters())
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_cut_off(trainer: Any) -> bool:
    """Reentrant checkpointing over inputs without gradients: some adapters may train while others do not (TRL 2848)."""
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant") is not False
    return (
        trainer.args.gradient_checkpointing
        and reentrant
        and _is_peft(trainer.model)
        and not _inputs_need_grad(trainer.model)
    )


def _share_without_signal(trainer: Any, noted: Mapping[str, Sequence[float]]) -> float | None:
    """The share of the groups, or of the generations up to 0.17, without a signal; None if the log does not tell."""
    deviations = noted.get("reward_std") or [math.nan]
    shares = noted.get("frac_reward_zero_std") or [float(each < 1e-6) for each in deviations]
    if max(deviations) < 1e-6 or min(shares) == 1.0:
        return 1.0
    of_batch = getattr(trainer.args, "scale_rewards", None) == "batch"
    of_batch = of_batch or getattr(trainer.args, "multi_objective_aggregation", None) == "normalize_then_sum"
    return None if of_batch or any(map(math.isnan, deviations)) else sum(shares) / len(shares)


def _diagnose(trainer: Any, run: _Run, logs: Mapping[str, Any], noted: Mapping[str, Sequence[float]]) -> str | None:
    """The case, if the log entry completes the proof of one. ``noted`` are the metrics of each generation in it."""
    mean = {name: sum(values) / len(values) for name, values in noted.items() if values}
    loss, grad_norm = logs["loss"], logs.get("grad_norm", math.nan)
    share = _share_without_signal(trainer, noted)
    patience = 4 * _PATIENCE if trainer.args.fp16 else _PATIENCE
    flows = math.isfinite(grad_norm) and grad_norm > 1e-6
    run.entries += 1
    if share == 1.0 and run.mute >= 0:
        run.mute += len(noted.get("reward_std", ()))
    elif share != 1.0 and "reward_std" in mean:
        run.mute = -1
    if grad_norm > 0:
        run.still = -1.0
    elif grad_norm == 0 and share is not None and run.still >= 0:
        run.still += 1.0 - share
    if share is not None:
        zero = abs(loss) < _SHOWN_AS_ZERO and flows and share < 1.0
        run.zeros = run.zeros + 1 if zero else 0

    if run.entries == 1 or run.still >= patience:
        tensors = dict(trainer.model.named_parameters())
        masked = (
            getattr(trainer.args, "mask_truncated_completions", False) and mean.get("completions/clipped_ratio") == 1
        )
        state = "; ".join(_state(trainer, tensors))
        if said := _no_gradient(run.still, patience, run.entries, _optimized(trainer), state, masked):
            return said
    rewards = {
        name.removeprefix("rewards/").removesuffix("/mean"): value
        for name, value in mean.items()
        if name.startswith("rewards/") and not name.endswith("/std")
    }
    if said := _no_signal(run.mute, trainer.beta, rewards):
        return said
    said = _no_bug(run.zeros, loss, grad_norm, trainer.beta, mean.get("kl"))
    return None if said is None or _is_cut_off(trainer) else said


def say_why_the_loss_is_zero(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Look at each log entry of a training step until one case is proven."""
    run = _runs.setdefault(instance, _Run())
    logs = argument(wrapped, args, kwargs, "logs")
    said = None
    # The entry at the end of a run has no loss, that of an evaluation an eval_loss, a callback's own neither.
    if not run.over and instance.accelerator.is_main_process and "loss" in logs:
        # Up to 0.15 the metrics are not kept by mode.
        said = _diagnose(instance, run, logs, instance._metrics.get("train", instance._metrics))
    result = wrapped(*args, **kwargs)
    if said is not None:
        run.over = True
        _log.log(logging.INFO if said.startswith("no bug") else logging.WARNING, "GRPO: %s", said)
    return result


def say_what_became_of_the_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Look at the model that was given and at the one that came of it."""
    model = argument(wrapped, args, kwargs, "model")
    added = argument(wrapped, args, kwargs, "peft_config") is not None
    before: dict[str, Any] = {}
    said: list[str | None] = []
    if _is_peft(model):
        before = _adapter(model) if added else {}
        if not added and not any(each.requires_grad for each in model.parameters()):
            inference = [name for name in model.active_adapters if model.peft_config[name].inference_mode]
            said.append(_not_trainable(sum(1 for _ in model.parameters()), inference))
    result = wrapped(*args, **kwargs)
    if before:
        merged = all(each is not model for each in instance.model.modules())
        after = dict(model.named_parameters())
        changed = sum(name not in after or not after[name].equal(old.to(after[name])) for name, old in before.items())
        said.append(_lost(len(before), changed, merged))
    liger = getattr(instance, "use_liger_loss", False) or getattr(instance, "use_liger_kernel", False)
    if liger and _is_peft(instance.model):
        from peft.tuners.tuners_utils import BaseTunerLayer

        head: Any = instance.model.get_output_embeddings()
        its = list(head.parameters()) if isinstance(head, BaseTunerLayer) else []
        tensors = sum(each.requires_grad for each in its)
        prompt = [name for name, config in instance.model.peft_config.items() if config.is_prompt_learning]
        said.append(_missed(tensors, prompt))
    for each in filter(None, said):
        if instance.accelerator.is_main_process:
            _log.warning("GRPO: %s", each)
        # Frozen as it was given: that there is no gradient follows.
        _runs.setdefault(instance, _Run()).over |= each.startswith("0 of")
    return result


def the_case_is_named(module: ModuleType) -> Outcome:
    """Four runs of ten log entries: how many of the three that show a 0 have exactly their case named.

    A fourth, healthy, must have nothing said of it.
    """
    import torch

    class Metrics(dict[str, list[float]]):
        """By mode and not: those of each mode are these."""

        def __missing__(self, mode: str) -> Metrics:
            return self

    heard: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        heard.append(record.getMessage())
        return False

    def messages_of(loss: float, grad_norm: float, deviation: float) -> list[str]:
        trainer = stub_grpo_trainer(module, beta=0.0, fp16=False)
        trainer.model = torch.nn.Embedding(1, 1)
        trainer.model.get_input_embeddings = lambda: trainer.model
        trainer.state = SimpleNamespace(epoch=None, log_history=[], global_step=1, num_input_tokens_seen=0)
        trainer.callback_handler = SimpleNamespace(on_log=lambda args, state, control, logs: control)
        heard.clear()
        for _ in range(_PATIENCE):
            noted = {
                "reward_std": [deviation],
                "frac_reward_zero_std": [float(deviation == 0)],
                "rewards/r/mean": [0.5],
            }
            trainer._metrics = Metrics(noted)
            trainer.log({"loss": loss, "grad_norm": grad_norm, "learning_rate": 1e-6})
        return heard.copy()

    level = _log.level
    _log.setLevel(logging.INFO)
    _log.addFilter(keep)
    try:
        healthy = messages_of(0.1, 0.5, 0.3)
        cases = {
            "no bug": messages_of(0.0, 0.5, 0.3),
            "no learning signal": messages_of(0.0, 0.0, 0.0),
            "no gradient": messages_of(0.0, 0.0, 0.3),
        }
    finally:
        _log.removeFilter(keep)
        _log.setLevel(level)
    if healthy:
        raise AssertionError(f"of a healthy run it was said: {healthy}")
    named = sum(len(said) == 1 and said[0].startswith(f"GRPO: {case}") for case, said in cases.items())
    return judge(named, right=3, wrong=0, messages=sum(map(len, cases.values())))
