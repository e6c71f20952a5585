"""Measure a training step without a patch, with it, and with the first fixed release, on the same weights and rows.

``python -m benchmarks.training EXECUTION ROUNDS STEPS HIDDEN MODE...`` trains a Mixtral with the real SFTTrainer of
each mode.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import resource
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import measure
from benchmarks.measure import Finding, Result
from benchmarks.turns import Runner

PATCH = "sft-aux-loss-counted-twice"
BUGGY, FIXED = "0.23.0", "0.23.1"
RELEASES = {"unpatched": BUGGY, "patched": BUGGY, "fixed": FIXED}
COMPILE_BACKENDS = {"eager": "", "compiled": "inductor"}
PROCESSES, ROUNDS, STEPS = 5, 3, 80
"""The processes, the rounds in each, and the steps of a round."""
WARM_UP = 3
OVERLAYS = "TRL_BENCHMARK_OVERLAYS"
"""The variable with the folders of the releases, by mode."""


def trl_of(mode: str) -> Any:
    """Import the TRL of a mode, in the place of the one that is imported now.

    Classes that were imported from that keep their modules. The patched mode must come last: no mode is without its
    hook from then on.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        del sys.modules[name]
    overlays = json.loads(os.environ[OVERLAYS])
    sys.path[:] = [overlays[mode], *(folder for folder in sys.path if folder not in overlays.values())]
    importlib.invalidate_caches()
    with measure.only(PATCH, mode):
        trl = importlib.import_module("trl")
        classes = trl.SFTTrainer, trl.SFTConfig
    assert trl.__version__ == RELEASES[mode], trl.__version__
    return classes


def mixtral(hidden: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
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


def train(classes: Any, execution: str, steps: int, model: Any, runner: Runner) -> dict[str, Any]:
    """Train, and return the losses and the number of graphs that were compiled before the end."""
    import torch
    import transformers
    from datasets import Dataset

    import tiny

    class ByTurns(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            runner.step_begins()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            runner.step_ends()

    trainer_class, config_class = classes
    tokenizer = tiny.tokenizer()
    row = dict(tokenizer(" ".join(f"w{index * 7 % 60}" for index in range(127))))
    backend = COMPILE_BACKENDS[execution]
    compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
    args = tiny.config(
        config_class,
        gradient_accumulation_steps=2,
        max_length=128,
        max_steps=steps + WARM_UP,
        learning_rate=0.0,
        **compiled,
    )
    trainer = tiny.trainer(
        trainer_class,
        model=model,
        args=args,
        train_dataset=Dataset.from_list([row] * 16),
        tokenizer=tokenizer,
        callbacks=[ByTurns()],
    )
    trainer.train()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(graphs) == bool(compiled), f"{graphs} graphs were compiled"
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], "graphs": graphs}


def by_turns(execution: str, rounds: int, steps: int, hidden: int, modes: Iterable[str]) -> Iterator[measure.Round]:
    """Train the modes in this process. They take turns, one step each, and train one model, which stays as it is.

    Two processes of one mode differ by more than the modes do, and so do two models of a process: by where their memory
    lies, and by what the machine does meanwhile. Each round has a new model.
    """
    import torch

    classes = {mode: trl_of(mode) for mode in sorted(modes, key="patched".__eq__)}
    order = random.Random()
    for _ in range(rounds):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = mixtral(hidden)
        runners = {
            mode: Runner(functools.partial(train, classes[mode], execution, steps, model))
            for mode in order.sample(list(classes), len(classes))
        }
        # The first turn is to the first step. One more than there are steps is to the end.
        for _ in range(1 + WARM_UP + steps):
            for mode in order.sample(list(runners), len(runners)):
                runners[mode].turn()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        times = ("step_ms", "step_cpu_ms")
        yield {
            mode: {**runner.results, "peak_mib": peak, **{name: runner.results[name][WARM_UP:] for name in times}}
            for mode, runner in runners.items()
        }
        del runners, model
        gc.collect()


def sample(execution: str, rounds: int, steps: int, modes: Iterable[str], hidden: int = 256) -> list[measure.Round]:
    """Return what a process of its own has measured that trains these modes."""
    overlays = {mode: str(measure.place(release).overlay) for mode, release in RELEASES.items()}
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(measure.WORK / "inductor"), OVERLAYS: json.dumps(overlays)}
    with measure.for_training(BUGGY, **variables) as environment:
        command = [measure.place(BUGGY).python, "-m", "benchmarks.training", execution, str(rounds), str(steps)]
        command += [str(hidden), *modes]
        measured: list[measure.Round] = measure.process(command, environment)["rounds"]
        return measured


def check(rounds: Sequence[measure.Round]) -> None:
    """Raise ``RuntimeError`` unless the bug shows unpatched, and patched training is that of the fixed release."""
    for samples in rounds:
        for number, losses in enumerate(zip(*(samples[mode]["losses"] for mode in RELEASES), strict=True), 1):
            loss = dict(zip(RELEASES, losses, strict=True))
            if abs(loss["patched"] - loss["fixed"]) > 1e-3 or abs(loss["unpatched"] - loss["fixed"]) < 1e-1:
                raise RuntimeError(
                    f"step {number}: the losses are {loss}: expected patched as fixed, and unpatched another"
                )


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": f"{BUGGY}, {FIXED}"})
    processes, of_each, steps = (1, 2, 5) if quick else (PROCESSES, ROUNDS, STEPS)
    for execution in COMPILE_BACKENDS:
        rounds = [one for _ in range(processes) for one in sample(execution, of_each, steps, RELEASES)]
        alone = [
            {mode: sample(execution, 1, 1, [mode])[0][mode] for mode in RELEASES} for _ in range(1 if quick else 6)
        ]
        for measured in (rounds, alone):
            check(measured)
        result.samples[execution] = measure.as_plain_data(rounds)
        result.samples[f"{execution}, each in a process"] = measure.as_plain_data(alone)
        for baseline in ("fixed", "unpatched"):
            for quantity, name in (("step_ms", "a step"), ("step_cpu_ms", "CPU time of a step")):
                goal = 1.01 if (baseline, quantity) == ("fixed", "step_ms") else None
                ratio = measure.ratio_of_steps(rounds, "patched", baseline, quantity)
                result.findings.append(Finding(f"{execution}, {name}: patched / {baseline}", ratio, goal=goal))
            memory = measure.ratio(alone, "patched", baseline, "peak_mib")
            result.findings.append(Finding(f"{execution}, peak memory: patched / {baseline}", memory))
        step = measure.estimate([statistics.median(samples["unpatched"]["step_ms"]) for samples in rounds])
        result.findings.append(Finding(f"{execution}: a step, unpatched", step, "ms"))
    return result


if __name__ == "__main__":
    execution, rounds, steps, hidden, *modes = sys.argv[1:]
    turns = by_turns(execution, int(rounds), int(steps), int(hidden), modes)
    print(json.dumps({"rounds": list(turns)}))
