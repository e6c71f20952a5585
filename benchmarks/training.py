"""What a patch costs a training step: unpatched, patched, and the first fixed release, on the same weights and rows.

``python training.py MODE HOW STEPS HIDDEN`` trains a Mixtral with the real SFTTrainer in a process of its own.
"""

from __future__ import annotations

import functools
import json
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


def one(mode: str, how: str, steps: int, hidden: int) -> dict[str, Any]:
    """The median time of a step after the first few, the peak memory of the process, and the losses."""
    import torch
    import transformers
    from datasets import Dataset

    import tiny

    with measure.only(PATCH, mode):
        from trl import SFTConfig, SFTTrainer
    stamps: list[tuple[float, float]] = []

    class Stamps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            stamps.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append((time.perf_counter(), time.process_time()))

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
        callbacks=[Stamps()],
    )
    trainer.train()
    pairs = list(zip(stamps[::2], stamps[1::2], strict=True))[WARM_UP:]
    wall, cpu = (statistics.median((end[at] - begin[at]) * 1e3 for begin, end in pairs) for at in (0, 1))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(graphs) == bool(compiled), f"{graphs} graphs were compiled"
    return {
        "step_ms": wall,
        "step_cpu_ms": cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
        "graphs": graphs,
    }


def sample(mode: str, how: str, steps: int, hidden: int = 256) -> dict[str, Any]:
    cache = str(measure.WORK / "inductor")
    return measure.trained(__file__, RELEASES[mode], mode, how, steps, hidden, TORCHINDUCTOR_CACHE_DIR=cache)


def check(done: list[measure.Round]) -> None:
    """Raises ``RuntimeError`` unless the bug shows unpatched, and patched training is that of the fixed release."""
    for each in done:
        first = {mode: each[mode]["losses"][0] for mode in RELEASES}
        if abs(first["patched"] - first["fixed"]) > 1e-3 or abs(first["unpatched"] - first["fixed"]) < 1e-1:
            raise RuntimeError(f"the first losses are {first}: expected patched as fixed, and unpatched another")


def run(*, quick: bool) -> Result:
    result = Result(versions={"trl": f"{BUGGY}, {FIXED}"})
    for how in WAYS:
        variants = {mode: functools.partial(sample, mode, how, 10 if quick else 40) for mode in RELEASES}
        done = measure.rounds(variants, 2 if quick else 7, warm_up=how == "compiled" or not quick)
        check(done)
        result.samples[how] = measure.spread(done)
        for other in ("fixed", "unpatched"):
            for quantity, said in (
                ("step_ms", "a step"),
                ("step_cpu_ms", "CPU time of a step"),
                ("peak_mib", "peak memory"),
            ):
                goal = 1.01 if (other, quantity) == ("fixed", "step_ms") else None
                it = measure.ratio(done, "patched", other, quantity)
                result.findings.append(Finding(f"{how}, {said}: patched / {other}", it, goal=goal))
        step = measure.estimate([each["unpatched"]["step_ms"] for each in done])
        result.findings.append(Finding(f"{how}: a step, unpatched", step, "ms"))
    return result


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
