"""Run inside one release: train flattened batches with the attention of FlashAttention, and padded ones.

    python -m bench.inside.train_with_flash OUT.json METHOD on|off

METHOD is ``sft``, ``completions`` (the collator of completions) or ``dpo``. OUT.json has, for each case, by how much
the loss and a gradient differ from those of the padded batch at most, how many batches were seen to be flattened, how
many sequences a call of the attention had, and the number of messages of trl_hotfix.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.model import State

import tiny
from bench.proving import prove
from tiny import dpo_steps, flash

PATCHES = {
    "sft": ["sft-padding-free-contamination"],
    "completions": ["completion-only-collator-padding-free"],
    "dpo": ["dpo-padding-free-contamination", "dpo-padding-free-wrong-terms", "dpo-padding-free-liger"],
}

Answer = dict[str, float]


def names() -> tuple[str, ...]:
    """Return the names under which this transformers can have the attention."""
    return (flash.NAME, flash.FLASH_ATTENTION_2) if flash.is_registry_public() else (flash.FLASH_ATTENTION_2,)


def llama(folder: str, name: str | None, *, seed: int = 0) -> Any:
    model = tiny.llama(folder, seed=seed)
    return model if name is None else flash.use(model, name)


def watched(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Return what ``make()`` returns, the most sequences that the attention had at once, and the messages."""
    flash.calls.clear()
    result, messages = tiny.warnings_of(make)
    return result, {"sequences": max(flash.calls, default=0), "messages": len(messages)}


def sft(folder: str) -> dict[str, Answer]:
    from trl import SFTConfig

    from bench.inside.train_padding_free import one_step

    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    # transformers counts the first token of a padded row as a label. In a prompt it is a label in neither batch.
    prompts = {"prompts": "completion_only_loss" in fields}
    cases = {"flattened": {"padding_free": True}}
    cases["checkpointing"] = {"padding_free": True, "gradient_checkpointing": True}
    if "packing_strategy" in fields:
        # Two rows of 16 tokens hold all 24; the order of the sequences does not matter. 0.19 packs no prompts.
        cases["packed"] = {"packing": True, "eval_packing": False, "prompts": False}

    def run(name: str | None, **settings: Any) -> dict[str, Any]:
        trainer, step, record = one_step(
            folder,
            make_model=lambda folder, seed: llama(folder, name),
            learning_rate=0.0,
            **{**prompts, **settings},
        )
        labels = record["batch"]["labels"]
        tokens = int(record["batch"].get("num_items_in_batch", 0)) or int((labels[:, 1:] != -100).sum())
        gradients = {key: value * tokens for key, value in step.gradients.items()}
        return {
            "loss": record["loss"] * tokens,
            "gradients": gradients,
            "rows": len(labels),
            "eval": trainer.evaluate(),
        }

    answers: dict[str, Answer] = {}
    for case, settings in cases.items():
        padded = run(None, **{key: value for key, value in settings.items() if key == "prompts"})
        for name in names():
            flat, seen = watched(lambda name=name, settings=settings: run(name, **settings))
            pairs = [(value, flat["gradients"][key]) for key, value in padded["gradients"].items()]
            evaluated = {"eval": abs(flat["eval"]["eval_loss"] - padded["eval"]["eval_loss"])}
            answers[f"{case}, {name}"] = {
                "loss": abs(flat["loss"] - padded["loss"]),
                "gradient": max(float((value - other).abs().max()) for value, other in pairs),
                # A mean over the labels, of which a flattened batch has fewer if there are no prompts.
                **(evaluated if settings.get("prompts", prompts["prompts"]) else {}),
                "flat": int(flat["rows"] == 1),
                **seen,
            }
    return answers


def completions(folder: str) -> dict[str, Answer]:
    proof = prove.proof_of("completion-only-collator-padding-free")
    padded = proof.one_step(llama(folder, None), padding_free=False)
    answers: dict[str, Answer] = {}
    for checkpointing in (False, True):
        settings = {"gradient_checkpointing": True} if checkpointing else {}
        for name in names():
            flat, seen = watched(
                lambda name=name, settings=settings: proof.one_step(llama(folder, name), padding_free=True, **settings)
            )
            answers[f"{'checkpointing' if checkpointing else 'flattened'}, {name}"] = {
                "loss": abs(flat.loss - padded.loss),
                "gradient": padded.difference(flat),
                "eval": abs(flat.eval_loss - padded.eval_loss),
                "flat": int(len(flat.batch["input_ids"]) == 1),
                **seen,
            }
    return answers


def dpo(folder: str) -> dict[str, Answer]:
    import trl

    terms = prove.proof_of("dpo-padding-free-wrong-terms")
    liger = prove.proof_of("dpo-padding-free-liger")
    # With reentrant checkpointing, the default of old releases, the formula could not ask for gradients.
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "flattened": (dpo_steps.reference_or_policy, {"reference": 1}),
        "checkpointing": (dpo_steps.reference_or_policy, {"reference": 1, **checkpointing}),
        "adapter": (dpo_steps.reference_or_policy, {"adapter": True}),
        "precomputed": (
            dpo_steps.reference_or_policy,
            {"reference": 1, "precompute_ref_log_probs": True, "prepare": lambda trainer: trainer.evaluate()},
        ),
        "ipo": (terms.ipo, {"reference": 1, "loss_type": "ipo"}),
    }
    if hasattr(trl.DPOTrainer, "_compute_loss_liger"):
        cases["liger"] = (dpo_steps.reference_or_policy, {"reference": 1, "prepare": liger.use_liger})
    answers: dict[str, Answer] = {}
    for case, (formula, settings) in cases.items():
        for name in names():

            def make(folder: str, *, seed: int, name: str = name) -> Any:
                # The formula is computed by the same models, from padded rows.
                return llama(folder, name, seed=seed)

            flat: list[int] = []
            prepare = functools.partial(_note_flat, flat, settings.get("prepare"), of_decoder=case == "liger")
            run, seen = watched(
                lambda formula=formula, make=make, settings=settings, prepare=prepare: dpo_steps.dpo_steps(
                    formula, make, padding_free=True, learning_rate=0.01, **{**settings, "prepare": prepare}
                )
            )
            answers[f"{case}, {name}"] = {"loss": dpo_steps.difference_from_formula(run), "flat": len(flat), **seen}
    return answers


def _note_flat(flat: list[int], prepare: Any, trainer: Any, *, of_decoder: bool) -> None:
    """Prepare the trainer, and append to ``flat`` for each flattened batch that its model, or decoder, is given.

    The formula is computed by the same model, from rows without position ids.
    """
    if prepare is not None:
        prepare(trainer)
    model = trainer.model.get_decoder() if of_decoder else trainer.model

    def record(model: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("position_ids") is not None:
            flat.append(len(kwargs["position_ids"]))

    model.register_forward_pre_hook(record, with_kwargs=True)


def main(out: str, method: str, switch: str) -> None:
    if switch == "on":
        # Not strict, which gives each trainer a callback that names the bugs of other patches.
        trl_hotfix.apply(only=PATCHES[method], unknown_body="try")
    with tempfile.TemporaryDirectory() as folder:
        answers = globals()[method](folder)
    if switch == "on":
        states = {entry.id: entry.state for entry in trl_hotfix.status() if entry.id in PATCHES[method]}
        assert State.APPLIED in states.values(), states
        assert set(states.values()) <= {State.APPLIED, State.SKIPPED}, states
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
