"""What a patch gains: the reference forwards and the reference model that DPO's precomputing is there to save.

``python gain.py MODE HIDDEN`` trains a Llama with the real DPOTrainer in a process of its own. In the releases with the
bug there is one other way to train right: to do without precomputing, with a reference model in memory (``instead``).
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

PATCHES = {
    "dpo-precomputed-ref-logps-dropped": {"buggy": "0.12.2", "fixed": "0.13.0"},
    "dpo-precomputed-ref-logps-ignored": {"buggy": "0.9.6", "fixed": "0.10.1"},
}
MODES = ("unpatched", "patched", "fixed", "instead")
STEPS = 6
LOG_2 = 0.6931


def one(patch_id: str, mode: str, hidden: int) -> dict[str, Any]:
    """Reference forwards for a step, bytes of a reference model, step time, peak memory and the losses."""
    import torch
    import transformers

    import tiny

    with measure.only(patch_id, mode):
        from trl import DPOTrainer
    references: list[int] = []
    took: list[float] = []
    losses: list[float] = []

    class Measured(DPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            references.append(0)
            begin = time.perf_counter()
            loss = super().training_step(*args, **kwargs)
            took.append((time.perf_counter() - begin) * 1e3)
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
        if references and not torch.is_grad_enabled():
            references[-1] += 1

    policy = model()
    reference = model() if mode == "instead" else None
    for each in filter(None, (policy, reference)):
        each.register_forward_hook(count)
    words = tiny.tokenizer()
    words.bos_token = "<unk>"  # 0.9.6 puts it before every prompt, also where there is none
    # So that the second loss is neither log 2 nor 0.
    args = tiny.precomputed_dpo(max_steps=STEPS, learning_rate=(16 / hidden) ** 1.5)
    args.precompute_ref_log_probs = mode != "instead"
    trainer = tiny.trainer(
        Measured,
        model=policy,
        ref_model=reference,
        args=args,
        # One batch, again and again, so that the order of the rows plays no part.
        train_dataset=tiny.preferences().select(range(2)),
        tokenizer=words,
    )
    trainer.train()
    held = 0 if reference is None else sum(each.numel() * each.element_size() for each in reference.parameters())
    return {
        "reference_forwards": sum(references) / len(references),
        "reference_mib": held / 2**20,
        "step_ms": statistics.median(took[1:]),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "losses": losses,
    }


def sample(patch_id: str, mode: str, hidden: int = 512) -> dict[str, Any]:
    release = PATCHES[patch_id]["fixed" if mode == "fixed" else "buggy"]
    with measure.for_training(release) as environment:
        return measure.process([measure.place(release).python, __file__, patch_id, mode, str(hidden)], environment)


def check(done: list[measure.Round]) -> None:
    """Raises ``RuntimeError`` unless patched, fixed and ``instead`` train the same, and unpatched stays at log 2."""
    for each in done:
        # In the first step policy and reference are equal.
        second = {mode: each[mode]["losses"][1] for mode in MODES}
        right = second["fixed"]
        same = all(abs(second[mode] - right) < 1e-3 for mode in ("patched", "instead"))
        if not same or abs(second["unpatched"] - LOG_2) > 1e-3 or abs(right - LOG_2) < 1e-2:
            raise RuntimeError(f"the second losses are {second}: expected log 2 unpatched, and another one else")


def run(*, quick: bool) -> Result:
    result = Result()
    for patch_id, releases in PATCHES.items():
        variants = {mode: functools.partial(sample, patch_id, mode) for mode in MODES}
        done = measure.rounds(variants, 2 if quick else 7, warm_up=not quick)
        check(done)
        result.samples[patch_id] = measure.spread(done)
        result.versions[patch_id] = f"trl {releases['buggy']}, fixed {releases['fixed']}"
        said = f"TRL {releases['buggy']}"
        for mode in MODES:
            (forwards,) = {each[mode]["reference_forwards"] for each in done}
            goal = 0.0 if mode == "patched" else None
            what = f"{said}, {mode}: reference forwards a step"
            result.findings.append(Finding(what, measure.exact(forwards), goal=goal))
        (held,) = {each["instead"]["reference_mib"] for each in done}
        result.findings.append(Finding(f"{said}: reference model not needed", measure.exact(held), "MiB"))
        for other in ("instead", "unpatched"):
            for quantity, called in (("step_ms", "a step"), ("peak_mib", "peak memory")):
                it = measure.ratio(done, "patched", other, quantity)
                result.findings.append(Finding(f"{said}, {called}: patched / {other}", it))
    return result


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
