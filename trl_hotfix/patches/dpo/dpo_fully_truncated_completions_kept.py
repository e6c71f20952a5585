"""DPO and KTO train on rows whose prompt alone fills ``max_length``.

DPO's refactoring (0.29.0, pull request 3906) and KTO's (1.3.0) dropped ``max_prompt_length``. TRL keeps of a row its
first ``max_length`` tokens: the collator cuts, and in DPO up to 1.0.0rc1 the trainer, whatever the collator.
1.9.0 drops these rows at the end of ``_prepare_dataset``, and KTO's before it makes the mismatched completions
of the KL divergence (pull request 6321).

So the wrapper takes them out of what the method returns. KTO's rows are then prepared once more without them: a row
takes its completion for the KL divergence from the row before, within batches. A collator of the user's may
cut nothing, and then nothing is dropped. ``_prepare_dataset`` does not know of it, so the constructor's wrapper notes
it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, has_own_collator, judge, module_of, note_own_collator, only_rows, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer


@wrapper
def note_the_collator(call: Call) -> None:
    """Make the trainer, and note before whether it is given a collator."""
    note_own_collator(call.__wrapped__, call.trainer, call.args, call.kwargs)
    call()


@wrapper
def drop_rows_without_an_answer(call: Call) -> Any:
    """Prepare a dataset without the rows whose prompt fills ``max_length``."""
    settings, name = call["args"], call["dataset_name"]
    prepared, limit = call(), _limit(call.trainer, settings)
    if limit is None:
        return prepared

    def has_room(row: Any) -> bool:
        return len(row["prompt_ids"]) < limit

    doing = f"Dropping rows without an answer from {name} dataset"
    kept = only_rows(module_of(call), prepared, has_room, settings, doing)
    if kept is prepared or "KL_completion_ids" not in next(iter(kept), ()):
        return kept
    return call.with_(dataset=kept.remove_columns(["KL_completion_ids"]))()


def _limit(trainer: Any, settings: Any) -> int | None:
    """Return how many tokens of a row are kept, from its start on, or None if what is kept has the answer's end."""
    # DPO of 0.29 cuts what a collator of the user's returns, too.
    if has_own_collator(trainer) and not hasattr(trainer, "_truncate_inputs"):
        return None
    if getattr(settings, "truncation_mode", "keep_start") != "keep_start":
        return None
    # KTO of 1.3.0 keeps 512 tokens if the config has no limit.
    limit: int | None = getattr(trainer, "max_length", settings.max_length)
    return limit


def prompts_leave_room(module: ModuleType) -> Outcome:
    """Prepare two rows, one with a prompt that fills ``max_length``, and count the tokens of the prompts left."""
    method = "DPO" if "dpo" in module.__name__ else "KTO"
    trainer_class = getattr(module, f"{method}Trainer")
    if not hasattr(module, f"{method}Config") or not hasattr(trainer_class, "_prepare_dataset"):
        return absent(f"the {method}Trainer of this module stands elsewhere, or cuts prompts at max_prompt_length")
    if hasattr(trainer_class, "tokenize_row"):
        return absent("prompts are cut at max_prompt_length")
    answer = {"chosen": "d", "rejected": "e"} if method == "DPO" else {"completion": "d", "label": True}
    rows = stream([{"prompt": prompt, **answer} for prompt in ("ab", "abc")])
    tokenizer, settings = CharacterTokenizer(), default_arguments(getattr(module, f"{method}Config"), max_length=3)
    trainer = stub_trainer(trainer_class, settings, _tokenizer=tokenizer, _is_vlm=False, calculate_KL=False)
    with single_process(module):
        prepared = list(trainer._prepare_dataset(rows, tokenizer, settings, "train"))
    return judge(sum(len(row["prompt_ids"]) for row in prepared), right=2, wrong=5)
