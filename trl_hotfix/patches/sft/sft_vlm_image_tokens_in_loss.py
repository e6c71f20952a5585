"""SFT on images trains on the placeholders of the images.

``DataCollatorForVisionLanguageModeling`` makes every token a label that is not padding. An image takes hundreds of
places, all with the id of the same token. Up to 1.14.2 a comment says that the model must leave them out of its loss,
and that TRL cannot mask them since they differ between architectures. The usual models do not leave them out. The
processors of transformers name them: ``image_token_id``, and where there are several, such as the end of a row of
patches, ``image_ids`` in earlier releases and ``image_token_ids`` in later ones.

The wrapper takes them out of the labels of the collator's batch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, WarnOnce, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterProcessor

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
    """Count the labels that are images, in texts with one image, two and none. Each image has two tokens."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    collator = module.DataCollatorForVisionLanguageModeling(CharacterProcessor())
    # They end with the end-of-sequence token already, which another patch would append.
    texts: dict[str, list[int]] = {"\2a\1": [7], "\2\2bc\1": [8, 9], "e\1": []}
    rows = [{"images": images, "text": text} for text, images in texts.items()]
    return judge(int((collator(rows)["labels"] == 2).sum()), right=0, wrong=6)
