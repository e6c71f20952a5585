"""What a patch costs a training step: unpatched, patched, and the first fixed release, on the same weights and rows.

``python training.py MODE HOW STEPS HIDDEN`` trains a Mixtral with the real SFTTrainer in a process of its own.
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
WAYS = {"eager": "", "compiled": "inductor"}
WARM_UP = 3


def one(mode: str, how: str, steps: int, hidden: int) -> None:
    """Train, one step each time that a line comes in; the answer is how long it took, the last has all else too."""
    # What anybody prints goes to the standard error: the answers are alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch
    import transformers
    from datasets import Dataset

    import tiny

    with measure.only(PATCH, mode):
        from trl import SFTConfig, SFTTrainer
    stamps: list[tuple[float, float]] = []

    def answer(**more: Any) -> None:
        took = [(end - begin) * 1e3 for begin, end in zip(*stamps, strict=True)] or [0.0, 0.0]
        print(json.dumps({"step_ms": took[0], "step_cpu_ms": took[1], **more}), file=answers, flush=True)

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
    words = tiny.tokenizer()
    row = dict(words(" ".join(f"w{index * 7 % 60}" for index in range(127))))
    compiled = {"torch_compile": True, "torch_compile_backend": WAYS[how]} if WAYS[how] else {}
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
        tokenizer=words,
        callbacks=[ByTurns()],
    )
    trainer.train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(graphs) == bool(compiled), f"{graphs} graphs were compiled"
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer(peak_mib=peak, losses=losses, graphs=graphs)


def together(how: str, steps: int, hidden: int = 256) -> measure.Round:
    """The three train side by side: each in its process, and one step of one after one step of another.

    Between two processes, one after the other, a machine changes more than what is to be seen here.
    """
    cache = str(measure.WORK / "inductor")
    order = random.Random(0)
    with contextlib.ExitStack() as stack:
        children = {}
        for mode, release in RELEASES.items():
            environment = stack.enter_context(measure.for_training(release, TORCHINDUCTOR_CACHE_DIR=cache))
            command = [measure.place(release).python, __file__, mode, how, str(steps), str(hidden)]
            children[mode] = stack.enter_context(measure.told(command, environment))
            children[mode].answer()  # one after another: two that compile at once would wait for one another's files
        told: dict[str, list[dict[str, Any]]] = {mode: [] for mode in RELEASES}
        for _ in range(WARM_UP + steps):
            for mode in order.sample(list(RELEASES), len(RELEASES)):
                told[mode].append(children[mode].ask())
    return {
        mode: {**its[-1], **{name: [each[name] for each in its[WARM_UP:]] for name in ("step_ms", "step_cpu_ms")}}
        for mode, its in told.items()
    }


def check(done: list[measure.Round]) -> None:
    """Raises ``RuntimeError`` unless the bug shows unpatched, and patched training is that of the fixed release."""
    for each in done:
        first = {mode: each[mode]["losses"][0] for mode in RELEASES}
        if abs(first["patched"] - first["fixed"]) > 1e-3 or abs(first["unpatched"] - first["fixed"]) < 1e-1:
            raise RuntimeError(f"the first losses are {first}: expected patched as fixed, and unpatched another")


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": f"{BUGGY}, {FIXED}"})
    for how in WAYS:
        # Two processes of the same thing differ by more than what is looked for: many of them, with few steps each.
        done = [together(how, 10 if quick else 20) for _ in range(2 if quick else 14)]
        check(done)
        result.samples[how] = measure.spread(done)
        for other in ("fixed", "unpatched"):
            for quantity, said in (("step_ms", "a step"), ("step_cpu_ms", "CPU time of a step")):
                goal = 1.01 if (other, quantity) == ("fixed", "step_ms") else None
                it = measure.ratio_of_steps(done, "patched", other, quantity)
                result.findings.append(Finding(f"{how}, {said}: patched / {other}", it, goal=goal))
            memory = measure.ratio(done, "patched", other, "peak_mib")
            result.findings.append(Finding(f"{how}, peak memory: patched / {other}", memory))
        step = measure.estimate([statistics.median(each["unpatched"]["step_ms"]) for each in done])
        result.findings.append(Finding(f"{how}: a step, unpatched", step, "ms"))
    return result


if __name__ == "__main__":
    one(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
