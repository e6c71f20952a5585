"""SFT on images trains on the placeholders of the images.

``DataCollatorForVisionLanguageModeling`` makes every token a label that is not padding. An image takes hundreds of
places, all with the id of the same token. Up to 1.14.2 a comment says that the model has to leave them out of its loss,
which the usual models do not, and that masking is infeasible since these tokens differ between architectures. The
processors of transformers name theirs: ``image_token_id``, and where there are several, such as the end of a row of
patches, ``image_ids`` in earlier releases and ``image_token_ids`` in later ones.

The wrapper takes them out of the labels of the collator's batch.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, WarnOnce, absent, judge, wrapper
from ...model import Outcome, Verdict
from ...testing import CharacterProcessor, recorded_warnings

_warn = WarnOnce()


@wrapper
def learn_no_images(call: Call) -> Any:
    """Return the collator's own batch with labels, ``(rows, length)``, that are -100 on the placeholders of images."""
    import torch

    collator, batch = call.trainer, call()
    token_ids = _image_tokens(collator.processor)
    if not token_ids:
        _warn(
            collator,
            "sft-vlm-image-tokens-in-loss leaves the labels as they are: %s has no image_token_id",
            type(collator.processor).__name__,
        )
        return batch
    is_image = torch.isin(batch["labels"], torch.tensor(token_ids))
    if is_image.any():
        call.act()
        batch["labels"] = batch["labels"].masked_fill(is_image, -100)
    return batch


def _image_tokens(processor: Any) -> list[int]:
    """Return the ids of the tokens that stand for images, as far as the processor names them."""
    lists = (getattr(processor, name, None) or () for name in ("image_ids", "image_token_ids"))
    token_ids = [getattr(processor, "image_token_id", None), *(token_id for ids in lists for token_id in ids)]
    return [token_id for token_id in token_ids if token_id is not None]


def images_are_no_labels(module: ModuleType) -> Outcome:
    """Count the labels of images in a batch of texts, and compare all labels."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    collator = _collator(module)
    images: tuple[list[int], ...] = ([7], [8, 9], [])
    # They end with the end-of-sequence token already, which another patch would append.
    texts = ("\2a\1", "\2\2bc\1", "e\1")
    rows = [{"images": taken, "text": text} for taken, text in zip(images, texts, strict=True)]
    labels = collator(rows)["labels"]
    outcome = judge(float((labels == 2).sum()), right=0.0, wrong=6.0)
    if outcome.verdict is Verdict.FIXED and (mistakes := _mistakes_elsewhere(module, collator, rows)):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType, collator: Any, rows: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the tokens, in a later call, with other formats, and with other processors."""
    import torch

    expected = [[-100, -100, 97, 1, -100, -100, -100], [-100] * 4 + [98, 99, 1], [101, 1] + [-100] * 5]
    ids = [[2, 2, 97, 1, 0, 0, 0], [2, 2, 2, 2, 98, 99, 1], [101, 1, 0, 0, 0, 0, 0]]
    second = _collator(module)
    second.state = SimpleNamespace(global_step=1)
    mistakes = []
    with torch.no_grad():
        batches = [collator(rows), second(rows), second.torch_call(examples=rows)]
    for batch in batches:
        if batch["labels"].tolist() != expected or batch["input_ids"].tolist() != ids:
            mistakes.append(f"the batch is {batch}")
    # The character u begins what the user says.
    for row in (_conversation("messages"), _conversation("prompt", "completion")):
        batch = _collator(module)([row])
        if batch["labels"].tolist() != [[117, -100, -100, 97, 1, 97, 98, 1]]:
            mistakes.append(f"the labels of a conversation are {batch['labels'].tolist()}")
    collator = _collator(module, completion_only_loss=True)
    labels = collator([_conversation("prompt", "completion")])["labels"]
    given = SimpleNamespace(processor=collator.processor)
    if learn_no_images(Call(lambda: {"labels": labels}, given))["labels"] is not labels:
        mistakes.append("labels of completions are others")
    return mistakes + _mistakes_of_processors(module, rows)


def _conversation(first: str, second: str | None = None) -> dict[str, Any]:
    """Return a row of one column of messages, or of two."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    columns = {first: messages} if second is None else {first: messages[:1], second: messages[1:]}
    return {"images": [7], **columns}


def _mistakes_of_processors(module: ModuleType, rows: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with processors that name several tokens, or none."""
    mistakes = []
    named: dict[str, tuple[dict[str, Any], set[int]]] = {
        "a list before transformers 5": ({"image_ids": [2, 97]}, {1, 98, 99, 101}),
        "a list of transformers 5": ({"image_token_ids": [97, 98], "image_ids": None}, {1, 99, 101}),
        "a list alone": ({"image_token_id": None, "image_token_ids": [98, None]}, {1, 2, 97, 99, 101}),
    }
    for name, (attributes, right) in named.items():
        collator = _collator(module)
        vars(collator.processor).update(attributes)
        with recorded_warnings() as warnings:
            labels = set(collator(rows)["labels"].flatten().tolist()) - {-100}
        if labels != right or warnings:
            mistakes.append(f"{name}: the labels are {labels}, the warnings {warnings}")
    collator = _collator(module)
    collator.processor.image_token_id = None
    with recorded_warnings() as warnings:
        counts = [int((collator(rows)["labels"] == 2).sum()) for _ in range(2)]
    right_warning = (
        "sft-vlm-image-tokens-in-loss leaves the labels as they are: CharacterProcessor has no image_token_id"
    )
    if counts != [6, 6] or warnings != [right_warning]:
        mistakes.append(f"of an unknown token there are {counts} labels, and the warnings are {warnings}")
    return mistakes


def _collator(module: ModuleType, **settings: Any) -> Any:
    return module.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)
