"""Measure the gain of a patch: the reference forwards and the reference model that DPO's precomputing should save.

``python -m benchmarks.gain ID MODE HIDDEN`` trains a Llama with the real DPOTrainer in a process of its own. The
releases with the bug can train correctly in one other way: without precomputing, with a reference model in memory
(``instead``).
"""

from __future__ import annotations

import functools
import json
import resource
import statistics
import sys
import time
from typing import Any

from benchmarks import measure
from benchmarks.measure import Finding, Result

PATCHES = {
    "dpo-precomputed-ref-logps-dropped": {"buggy": "0.12.2", "fixed": "0.13.0"},
    "dpo-precomputed-ref-logps-ignored": {"buggy": "0.9.6", "fixed": "0.10.1"},
}
MODES = ("unpatched", "patched", "fixed", "instead")
STEPS = 6
LOG_2 = 0.6931


def train(patch_id: str, mode: str, hidden: int) -> dict[str, Any]:
    """Return reference forwards per step, size of a reference model, step time, peak memory and the losses."""
    import torch
    import transformers

    import tiny

    with measure.only(patch_id, mode):
        from trl import DPOTrainer
    reference_forwards: list[int] = []
    step_times: list[float] = []
    losses: list[float] = []

    class Measured(DPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            reference_forwards.append(0)
            begin = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            step_times.append((time.perf_counter() - begin) * 1e3)
            losses.append(float(loss))
            return loss

    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        return transformers.LlamaForCausalLM(config)

    def count(*_: Any) -> None:
        if reference_forwards and not torch.is_grad_enabled():
            reference_forwards[-1] += 1

    policy = model()
    reference = model() if mode == "instead" else None
    for counted_model in filter(None, (policy, reference)):
        counted_model.register_forward_hook(count)
    tokenizer = tiny.tokenizer()
    tokenizer.bos_token = "<unk>"  # TRL 0.9.6 puts it before every prompt, even if the tokenizer has none.
    # With this learning rate the second loss is neither log 2 nor 0.
    args = tiny.precomputed_dpo(max_steps=STEPS, learning_rate=(16 / hidden) ** 1.5)
    args.precompute_ref_log_probs = mode != "instead"
    trainer = tiny.trainer(
        Measured,
        model=policy,
        ref_model=reference,
        args=args,
        # Every step has the same batch, so that the order of the rows does not matter.
        train_dataset=tiny.preferences().select(range(2)),
        tokenizer=tokenizer,
    )
    trainer.train()
    parameters = [] if reference is None else list(reference.parameters())
    return {
        "reference_forwards": sum(reference_forwards) / len(reference_forwards),
        "reference_mib": sum(tensor.numel() * tensor.element_size() for tensor in parameters) / 2**20,
        "step_ms": statistics.median(step_times[1:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": losses,
    }


def sample(patch_id: str, mode: str, hidden: int = 512) -> dict[str, Any]:
    release = PATCHES[patch_id]["fixed" if mode == "fixed" else "buggy"]
    with measure.for_training(release) as environment:
        command = [measure.place(release).python, "-m", "benchmarks.gain", patch_id, mode, str(hidden)]
        return measure.process(command, environment)


def check(rounds: list[measure.Round]) -> None:
    """Raise ``RuntimeError`` unless patched, fixed and ``instead`` train the same, and unpatched stays at log 2."""
    for samples in rounds:
        # In the first step policy and reference are equal.
        second = {mode: samples[mode]["losses"][1] for mode in MODES}
        expected = second["fixed"]
        agree = all(abs(second[mode] - expected) < 1e-3 for mode in ("patched", "instead"))
        if not agree or abs(second["unpatched"] - LOG_2) > 1e-3 or abs(expected - LOG_2) < 1e-2:
            raise RuntimeError(f"the second losses are {second}: expected log 2 unpatched, and another one else")


def run(*, quick: bool) -> Result:
    result = Result()
    for patch_id, releases in PATCHES.items():
        variants = {mode: functools.partial(sample, patch_id, mode) for mode in MODES}
        rounds = measure.run_rounds(variants, 2 if quick else 7, warm_up=not quick)
        check(rounds)
        result.samples[patch_id] = measure.as_plain_data(rounds)
        result.versions[patch_id] = f"trl {releases['buggy']}, fixed {releases['fixed']}"
        release = f"TRL {releases['buggy']}"
        for mode in MODES:
            (forwards,) = {samples[mode]["reference_forwards"] for samples in rounds}
            goal = 0.0 if mode == "patched" else None
            label = f"{release}, {mode}: reference forwards a step"
            result.findings.append(Finding(label, measure.exact(forwards), goal=goal))
        (size,) = {samples["instead"]["reference_mib"] for samples in rounds}
        result.findings.append(Finding(f"{release}: reference model not needed", measure.exact(size), "MiB"))
        for baseline in ("instead", "unpatched"):
            for quantity, name in (("step_ms", "a step"), ("peak_mib", "peak memory")):
                ratio = measure.ratio(rounds, "patched", baseline, quantity)
                result.findings.append(Finding(f"{release}, {name}: patched / {baseline}", ratio))
    return result


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
