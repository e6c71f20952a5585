"""What patches cost on a device: trainings without and with them take turns in one process, one step each."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import trl_hotfix

import tiny
from benchmarks.turns import Runner
from gpu.runs import config, llama, rows

WARM_UP = 3
MOST_STEPS = 400


def turns(folder: str, device: str, what: str, tokens: str, seconds: str) -> dict[str, Any]:
    """Return the ratio of the times of a step, patched / unpatched, with the bounds of its median (99 %), and memory.

    ``what`` is sft, flattened, dpo or grpo, ``tokens`` the size of a batch. It ends as soon as the ratio is known to
    1 %, or after so many ``seconds``. Both train one model, whose weights stay as they are.
    """
    sizes = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 151_936 if what != "flattened" else 32_000}
    on_gpu = device == "cuda"
    model = llama(folder, "sdpa", "bfloat16" if on_gpu else "float32", **(sizes if on_gpu else {}))
    modules = {"off": _trl(), "all": _trl(patched=True)}
    applied = sum(status.state.value == "applied" for status in trl_hotfix.status())
    stop: list[bool] = []
    runners = {
        mode: Runner(functools.partial(_train, module, what, int(tokens), device, model, stop))
        for mode, module in modules.items()
    }
    begin, low, middle, high = time.perf_counter(), 0.0, 1.0, math.inf
    for turn in range(WARM_UP + MOST_STEPS):
        for mode in runners if turn % 2 else reversed(runners):
            runners[mode].turn()
        done = runners["off"].results["step_ms"][WARM_UP:], runners["all"].results["step_ms"][WARM_UP:]
        if min(map(len, done)) >= 12:
            low, middle, high = _median([on / off for off, on in zip(*done, strict=False)])
            if high - low < 0.01 or time.perf_counter() - begin > float(seconds):
                break
    stop.append(True)
    for runner in runners.values():
        runner.turn()
    return {
        "patches": applied,
        "steps": min(map(len, done)),
        "ms off": statistics.median(done[0]),
        "ms on": statistics.median(done[1]),
        "ratio": middle,
        "at least": low,
        "at most": high,
        **{f"MiB {mode}": runner.results["MiB"] for mode, runner in runners.items()},
    }


def _median(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of ratios, between its bounds: order statistics of a binomial, 99 %."""
    ordered, count = sorted(ratios), len(ratios)
    apart = math.ceil(2.576 * math.sqrt(count) / 2)
    return ordered[max(count // 2 - apart, 0)], statistics.median(ordered), ordered[min(count // 2 + apart, count - 1)]


def _trl(*, patched: bool = False) -> Any:
    """Import TRL anew. Once patched, every later import is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    if patched:
        trl_hotfix.apply()
    trl = importlib.import_module("trl")
    # A lazy module would take them from the TRL that is imported next.
    _ = trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig
    return trl


def _train(
    trl: Any, what: str, tokens: int, device: str, model: Any, stop: list[bool], runner: Runner
) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    peaks: list[float] = []

    class ByTurns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            runner.step_begins()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated() / 2**20)
            runner.step_ends()
            control.should_training_stop = bool(stop)

    trainer = TRAINERS[what](trl, tokens, device, model, [ByTurns()])
    trainer.train()
    del trainer
    gc.collect()
    return {"MiB": max(peaks, default=None)}


def _arguments(config_class: type, device: str, **settings: Any) -> Any:
    dtype = "bfloat16" if device == "cuda" else "float32"
    usual = {"max_steps": WARM_UP + MOST_STEPS + 1, "learning_rate": 0.0, "optim": "sgd"}
    return config(config_class, device, dtype, **{**usual, **settings})


def _sft(trl: Any, tokens: int, device: str, model: Any, callbacks: list[Any], **settings: Any) -> Any:
    from datasets import Dataset

    # Sequences of half to one and a half times the mean length.
    length = max(tokens // 16, 4)
    lengths = tuple(length // 2 + (index * 7919) % max(length, 1) + 1 for index in range(16))
    usual = {"max_length": 2 * length, "per_device_train_batch_size": len(lengths)}
    return tiny.trainer(
        trl.SFTTrainer,
        model=model,
        args=_arguments(trl.SFTConfig, device, **{**usual, **settings}),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows(lengths)] * 4),
        tokenizer=tiny.tokenizer(),
        callbacks=callbacks,
    )


def _flattened(*given: Any) -> Any:
    return _sft(*given, padding_free=True, max_length=None, gradient_checkpointing=given[2] == "cuda")


def _dpo(trl: Any, tokens: int, device: str, model: Any, callbacks: list[Any]) -> Any:
    from datasets import Dataset

    length = max(tokens // 16, 8)
    texts = [" ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(length)) for index in range(24)]
    pairs = [
        {"prompt": one[: length // 4], "chosen": one, "rejected": other} for one, other in itertools.pairwise(texts)
    ]
    return tiny.trainer(
        trl.DPOTrainer,
        model=model,
        args=_arguments(trl.DPOConfig, device, per_device_train_batch_size=8, max_length=2 * length),
        train_dataset=Dataset.from_list(pairs),
        tokenizer=tiny.tokenizer(),
        callbacks=callbacks,
    )


def _grpo(trl: Any, tokens: int, device: str, model: Any, callbacks: list[Any]) -> Any:
    sizes = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": max(tokens // 256, 4)}
    return tiny.trainer(
        trl.GRPOTrainer,
        model=model,
        reward_funcs=lambda completions, **kwargs: [float(len(set(completion))) for completion in completions],
        args=_arguments(trl.GRPOConfig, device, beta=0.0, **sizes),
        train_dataset=tiny.preferences().select_columns(["prompt"]),
        tokenizer=tiny.tokenizer(),
        callbacks=callbacks,
    )


TRAINERS: dict[str, Callable[..., Any]] = {"sft": _sft, "flattened": _flattened, "dpo": _dpo, "grpo": _grpo}
