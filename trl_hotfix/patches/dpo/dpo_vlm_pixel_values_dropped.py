"""The pixel values of a row reach neither the policy nor, without precomputation, the reference of DPO.

``process_row`` makes them, ``DataCollatorForPreference`` (``PreferenceCollator`` at first) puts them into the batch,
and ``concatenated_forward`` passes them to the model. Between the first two ``remove_unused_columns`` (on by default)
drops every column that ``_set_signature_columns_if_needed`` does not list. Pull request 2233 made that list for texts
alone; 2413 added ``image_sizes`` in 0.13.0, and 4285 ``token_type_ids`` in 0.24.0. From 0.29.0 on (pull request 3906)
the collator makes the pixel values itself. 4022, which listed them, was not merged.
"""

from __future__ import annotations

import inspect
import logging
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import dpo_stub, tiny_causal_lm

_COLUMNS = ("pixel_values", "pixel_attention_mask")
_NEVER_PASSED = frozenset({"aspect_ratio_ids", "high_res_pixel_values", "image_grid_thw", "spatial_shapes"})
"""What Mllama, DeepSeek-VL, Qwen-VL and GLM-4V, and LFM2-VL need beside pixel values. DPO passes none of it on."""

_log = logging.getLogger("trl_hotfix")


@wrapper
def keep_the_images(call: Call) -> Any:
    """List the columns of images among those that TRL's collator reads, if the model can do with these."""
    trainer = call.trainer
    columns_unset = trainer._signature_columns is None
    result = call()
    if not columns_unset or not trainer.is_vision_model:
        return result
    obstacle = _obstacle(module_of(call), trainer)
    if obstacle is not None:
        _log.warning("DPO trains without the images of its dataset: %s", obstacle)
        return result
    call.act()
    trainer._signature_columns = [*trainer._signature_columns, *_COLUMNS]
    lengths = {name: getattr(trainer.args, name) for name in ("max_prompt_length", "max_length")}
    limits = [f"{name}={length}" for name, length in lengths.items() if length]
    if limits:
        _log.warning(
            "DPO passes the images on. A row that is cut within an image (%s) ends the run with an error of "
            "transformers: None keeps it whole",
            ", ".join(limits),
        )
    return result


def _obstacle(module: ModuleType, trainer: Any) -> str | None:
    """Return why this trainer must not be given the columns, or None."""
    if not isinstance(trainer.data_collator, _collator_class(module)):
        # It may fail on columns that it has not been given so far.
        return (
            "remove_unused_columns=True drops pixel_values and pixel_attention_mask before they reach the data "
            "collator, which is not TRL's. If it reads them, train with remove_unused_columns=False"
        )
    # The forward of a PeftModel takes any keywords.
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    missing = _NEVER_PASSED & inspect.signature(model.forward).parameters.keys()
    if missing:
        return (
            f"{type(model).__name__} needs {', '.join(missing)} with them, which this release of TRL does not pass on"
        )
    return None


def _collator_class(module: ModuleType) -> Any:
    return getattr(module, "DataCollatorForPreference", None) or module.PreferenceCollator


def images_reach_the_batch(module: ModuleType) -> Outcome:
    """Add up what a batch has of the pixels and of their mask, when it is made of the columns that are kept."""
    if not hasattr(module.DPOTrainer, "process_row"):
        return absent("no column of images is removed")
    collator = _collator_class(module)(pad_token_id=0)
    model = tiny_causal_lm()
    trainer = dpo_stub(module, model=model, is_vision_model=True, data_collator=collator, _signature_columns=None)
    trainer._set_signature_columns_if_needed()
    row = {f"{name}_input_ids": [1, 2] for name in ("prompt", "chosen", "rejected")}
    images = {"pixel_values": [[[2.0, 3.0]]], "pixel_attention_mask": [[1, 0]]}
    kept = {name: value for name, value in {**row, **images}.items() if name in trainer._signature_columns}
    batch = collator([kept])
    return judge(sum(float(batch[name].sum()) for name in images if name in batch), right=6.0, wrong=0.0)
