"""GRPO compares the log-probs of all tokens with those of vLLM, which are of the tokens that ``top_p`` and others keep.

vLLM returns ``processed_logprobs``: they are normalised over the tokens that it may sample. The trainer computes its
own over the whole vocabulary. So each ratio has the mass of the tokens that were kept as a factor, with equal weights
too. vLLM's raw log-probs would not do: they are without the temperature.

The wrapper lets the trainer compare log-probs over the tokens that are kept, and gives the loss those over all tokens
again: the policy's ratio has nothing of vLLM in it. vLLM's own are put on all tokens too, for the off-policy mask.

In server mode, ``trl vllm-serve`` returns raw log-probs before 0.27.1. From 1.11.0 on the server is started by ``vllm
serve`` with whatever mode the user names, and 1.16.0 can ask it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, tiny_causal_lm

_RESHAPES = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logits_processors",
    "guided_decoding",
    "structured_outputs",
)
"""What changes vLLM's distribution otherwise: the model's logits alone do not say which tokens it keeps."""


@wrapper
def compare_the_tokens_kept(call: Call) -> Any:
    """Compare the log-probs of the tokens that vLLM may sample. Its server returns those too."""
    return _compared(call)


@wrapper
def compare_the_tokens_kept_if_colocated(call: Call) -> Any:
    """Do so without a server, which returns raw log-probs, or whatever it was started with."""
    return _compared(call) if call.trainer.vllm_mode == "colocate" else call()


@wrapper
def compare_the_tokens_kept_if_processed(call: Call) -> Any:
    """Do so unless the server was started with other log-probs."""
    trainer = call.trainer
    if not _kept(trainer) or trainer.vllm_mode == "colocate":
        return _compared(call)
    from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

    modes = [None]
    # Only the main process has a client, and all must decide alike.
    if trainer.accelerator.is_main_process:
        modes = [trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]]
    broadcast_object_list(modes)
    return _compared(call) if modes == ["processed_logprobs"] else call()


def _kept(trainer: Any) -> dict[str, Any]:
    """Return by what vLLM cuts the vocabulary; nothing where it does not, or where nobody compares."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return {}
    args = trainer.args
    asked = args.generation_kwargs or {}
    regex = ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex")
    if (
        getattr(trainer, "rollout_func", None)
        or any(name in asked for name in _RESHAPES)
        or any(getattr(args, name, None) for name in regex)
        or args.repetition_penalty != 1.0
    ):
        return {}
    # top_k and min_p may be None.
    kept = {name: asked.get(name, getattr(args, name)) or 0 for name in ("top_p", "top_k", "min_p")}
    return kept if kept["top_p"] < 1 or kept["top_k"] > 0 or kept["min_p"] > 0 else {}


def _compared(call: Call) -> Any:
    import torch

    trainer, kept = call.trainer, _kept(call.trainer)
    if not kept:
        return call()
    scored: list[Any] = []
    method = trainer._get_per_token_logps_and_entropies

    def log_probs_of_what_is_kept(model: Any, *inputs: Any, **kwargs: Any) -> Any:
        # The first ones are the policy's, and the next ones the reference's.
        if scored:
            return method(model, *inputs, **kwargs)
        view, masses = _noting_masses(trainer, model, inputs[2], kept)
        if hasattr(trainer, "_chunked_logps") and trainer.use_liger_kernel:
            # 1.14 computes these without logits.
            result = method(model, *inputs, **kwargs)
            with shadowed(trainer, "use_liger_kernel", False):
                method(view, *inputs, **kwargs)
        else:
            result = method(view, *inputs, **kwargs)
        scored.extend([result[0], torch.cat(masses)])
        return (result[0] - scored[1], *result[1:])

    with shadowed(trainer, "_get_per_token_logps_and_entropies", log_probs_of_what_is_kept):
        output = call()
    output["old_per_token_logps"] = scored[0]
    if "sampling_per_token_logps" in output:
        output["sampling_per_token_logps"] = output["sampling_per_token_logps"] + scored[1]
    return output


def _noting_masses(trainer: Any, model: Any, count: int, kept: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Return a view of the model, and a list to which its calls add the log masses of what vLLM keeps."""
    import torch
    import wrapt

    masses: list[Any] = []

    class Noting(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs = self.__wrapped__(*args, **kwargs)
            # The fused head of 1.15 and later returns no logits.
            own = outputs if not kwargs.pop("fused_lm_head", False) else _unfused(trainer, model, count, args, kwargs)
            rows = own.logits[:, :-1][:, -count:] / trainer.temperature
            sampled = kwargs["input_ids"][:, -count:]
            # Row by row: copies of all logits may not fit.
            masses.append(torch.stack([_log_mass(*row, **kept) for row in zip(rows, sampled, strict=True)]))
            return outputs

    return Noting(model), masses


def _unfused(trainer: Any, model: Any, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the outputs of the model's own forward, with the logits of the completion alone if it can."""
    import inspect

    del kwargs["labels"]
    plain = trainer.accelerator.unwrap_model(model)
    plain = plain.get_base_model() if hasattr(plain, "get_base_model") else plain
    if "logits_to_keep" in inspect.signature(plain.forward).parameters:
        kwargs["logits_to_keep"] = count + 1
    return model(*args, **kwargs, use_cache=False)


def _log_mass(logits: Any, sampled: Any, top_p: float, top_k: int, min_p: float) -> Any:
    """Return the log of the probability of the tokens that vLLM keeps: by min_p, of these by top_k, then by top_p.

    Of ``logits`` ``(..., vocabulary)`` and ``sampled`` ``(...)``, the ids of the tokens that vLLM has sampled.
    """
    import torch

    log_probs = logits.float().log_softmax(-1)
    ordered = log_probs.sort(descending=True).values
    least = ordered[..., :1] + (math.log(min_p) if min_p > 0 else -math.inf)
    if top_k > 0:
        least = torch.maximum(least, ordered[..., :top_k][..., -1:])
    probs = ordered.masked_fill(ordered < least, -math.inf).softmax(-1)
    last = ((probs.cumsum(-1) - probs) < top_p).sum(-1, keepdim=True) - 1
    least = torch.maximum(least, ordered.gather(-1, last))
    # vLLM has kept what it sampled, and its numbers are not quite the trainer's.
    least = torch.minimum(least, log_probs.gather(-1, sampled[..., None]))
    return log_probs.masked_fill(log_probs < least, -math.inf).logsumexp(-1)


def ratio_of_equal_weights_is_one(module: ModuleType) -> Outcome:
    """Compare vLLM and the trainer with equal weights, if vLLM keeps two tokens that have 3/4 of the probability."""
    import torch

    if not hasattr(module.GRPOTrainer, "_generate_single_turn"):
        return absent("the trainer of this release does not compare its log-probs with vLLM's processed ones")
    model = tiny_causal_lm(vocabulary=16)
    probs = torch.full((16,), 1 / 4 / 14)
    probs[5], probs[1] = 1 / 2, 1 / 4
    model.weight.data[:] = probs.log()
    trainer = stub_that_scores(module, [[5, 1]] * 2, [0.0, 1.0], model=model, beta=0.0, top_k=2)
    _with_vllm(trainer, [[math.log(2 / 3), math.log(1 / 3)]] * 2)
    return judge(float(scored_completions(trainer)["importance_sampling_ratio"][0, 0]), right=1.0, wrong=3 / 4)


def _with_vllm(trainer: Any, log_probs: list[list[float]]) -> None:
    """Have the stub compare its log-probs with these of vLLM, token by token."""
    generate: Callable[..., tuple[Any, ...]] = trainer._generate_single_turn

    def generate_as_vllm(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # Not by shadowed: this is no act of the wrapper.
        asked, trainer.use_vllm = trainer.use_vllm, False
        result = generate(*args, **kwargs)
        trainer.use_vllm = asked
        return tuple(log_probs if part is None else part for part in result)

    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"}
    vars(trainer).update(settings, _generate_single_turn=generate_as_vllm)
