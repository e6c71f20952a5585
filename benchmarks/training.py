"""Measure a training step without a patch, with it, and with the first fixed release, on the same weights and rows.

``python training.py MODE EXECUTION STEPS HIDDEN`` trains a Mixtral with the real SFTTrainer in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import statistics
import sys
import time
from typing import Any

import measure
from measure import Finding, Result

PATCH = "sft-aux-loss-counted-twice"
BUGGY, FIXED = "0.23.0", "0.23.1"
RELEASES = {"unpatched": BUGGY, "patched": BUGGY, "fixed": FIXED}
COMPILE_BACKENDS = {"eager": "", "compiled": "inductor"}
WARM_UP = 3


def train(mode: str, execution: str, steps: int, hidden: int) -> None:
    """Train one step for each line that is read, and answer with its time. The last answer has the other results, too.

    Everything else that is printed goes to the standard error, so that the standard output has only the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch
    import transformers
    from datasets import Dataset

    import tiny

    with measure.only(PATCH, mode):
        from trl import SFTConfig, SFTTrainer
    stamps: list[tuple[float, float]] = []

    def answer(**results: Any) -> None:
        times = [(end - begin) * 1e3 for begin, end in zip(*stamps, strict=True)] or [0.0, 0.0]
        print(json.dumps({"step_ms": times[0], "step_cpu_ms": times[1], **results}), file=answers, flush=True)

    def stamp() -> None:
        stamps.append((time.perf_counter(), time.process_time()))

    class ByTurns(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            answer()
            sys.stdin.readline()
            stamps.clear()
            stamp()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamp()

    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            num_local_experts=4,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.5,
            output_router_logits=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    tokenizer = tiny.tokenizer()
    row = dict(tokenizer(" ".join(f"w{index * 7 % 60}" for index in range(127))))
    backend = COMPILE_BACKENDS[execution]
    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    args = tiny.config(
        SFTConfig,
        gradient_accumulation_steps=2,
        max_length=128,
        max_steps=steps + WARM_UP,
        learning_rate=1e-4,
        **compiled,
    )
    trainer = tiny.trainer(
        SFTTrainer,
        model=model,
        args=args,
        train_dataset=Dataset.from_list([row] * 16),
        tokenizer=tokenizer,
        callbacks=[ByTurns()],
    )
    trainer.train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(graphs) == bool(compiled), f"{graphs} graphs were compiled"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer(peak_mib=peak, losses=losses, graphs=graphs)


def together(execution: str, steps: int, hidden: int = 256) -> measure.Round:
    """Train the three modes side by side, each in its process. They take turns, one step at a time.

    If one process ran after the other, the machine would change in between by more than the difference to be measured.
    """
    cache = str(measure.WORK / "inductor")
    order = random.Random(0)
    with contextlib.ExitStack() as stack:
        children = {}
        for mode, release in RELEASES.items():
            environment = stack.enter_context(measure.for_training(release, TORCHINDUCTOR_CACHE_DIR=cache))
            command = [measure.place(release).python, __file__, mode, execution, str(steps), str(hidden)]
            children[mode] = stack.enter_context(measure.worker(command, environment))
            # One starts after the other, since two that compile at once would wait for the same files.
            children[mode].answer()
        answers: dict[str, list[dict[str, Any]]] = {mode: [] for mode in RELEASES}
        for _ in range(WARM_UP + steps):
            for mode in order.sample(list(RELEASES), len(RELEASES)):
                answers[mode].append(children[mode].ask())
    return {
        mode: {**lines[-1], **{name: [line[name] for line in lines[WARM_UP:]] for name in ("step_ms", "step_cpu_ms")}}
        for mode, lines in answers.items()
    }


def check(rounds: list[measure.Round]) -> None:
    """Raise ``RuntimeError`` unless the bug shows unpatched, and patched training is that of the fixed release."""
    for samples in rounds:
        first = {mode: samples[mode]["losses"][0] for mode in RELEASES}
        if abs(first["patched"] - first["fixed"]) > 1e-3 or abs(first["unpatched"] - first["fixed"]) < 1e-1:
            raise RuntimeError(f"the first losses are {first}: expected patched as fixed, and unpatched another")


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": f"{BUGGY}, {FIXED}"})
    for execution in COMPILE_BACKENDS:
        # Two processes of one mode differ by more than the modes do. So there are many processes, with few steps each.
        rounds = [together(execution, 10 if quick else 20) for _ in range(2 if quick else 14)]
        check(rounds)
        result.samples[execution] = measure.as_plain_data(rounds)
        for baseline in ("fixed", "unpatched"):
            for quantity, name in (("step_ms", "a step"), ("step_cpu_ms", "CPU time of a step")):
                goal = 1.01 if (baseline, quantity) == ("fixed", "step_ms") else None
                ratio = measure.ratio_of_steps(rounds, "patched", baseline, quantity)
                result.findings.append(Finding(f"{execution}, {name}: patched / {baseline}", ratio, goal=goal))
            memory = measure.ratio(rounds, "patched", baseline, "peak_mib")
            result.findings.append(Finding(f"{execution}, peak memory: patched / {baseline}", memory))
        step = measure.estimate([statistics.median(samples["unpatched"]["step_ms"]) for samples in rounds])
        result.findings.append(Finding(f"{execution}: a step, unpatched", step, "ms"))
    return result


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
