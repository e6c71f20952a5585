"""Some models take ``num_items_in_batch``, and return the mean over the micro-batch nevertheless.

``Trainer`` has the model divide its loss by the items of the whole step, and then divides by nothing itself. It takes a
model with ``**kwargs`` in its forward for one that does. Some drop them: they call torch's ``CrossEntropyLoss``, or
``self.loss_function`` without the keywords. transformers has repaired one after the other (issue 39123, pull requests
37208, 40333). Up to 1.14.2 TRL takes the loss of the model, from 1.6.0 on if ``loss_type`` is "nll".

Which models these are depends on the release, so the first micro-batch of a trainer shows it: the sum of the
cross-entropies of its logits is divided by its own tokens or by the items of the step, and the loss is one of the two.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, copies_of_the_loss, judge, micro_batches, module_of, wrapper
from ...model import Outcome
from ...testing import SftMoeStep

_CLEARLY = 0.9
"""If the two candidates are nearer to one another, the next micro-batch is asked again."""

_ignoring: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Whether the model of a trainer ignores the number of items."""


@wrapper
def divide_by_the_items(call: Call) -> Any:
    """Give the mean over a micro-batch the share that its tokens have of the step."""
    trainer, items, inputs = call.trainer, call["num_items_in_batch"], call["inputs"]
    act = call.act_later()
    labels = inputs.get("labels")
    by_model = trainer.model_accepts_loss_kwargs and not (trainer.compute_loss_func or trainer.label_smoother)
    copies = copies_of_the_loss(trainer)
    is_whole = micro_batches(trainer) * copies == 1 or "shift_labels" in inputs
    heeds = _ignoring.get(trainer) is False
    if heeds or is_whole or items is None or labels is None or not (by_model and call.is_training):
        return call()
    loss, outputs = call.with_(return_outputs=True)()
    predicted = (labels[..., 1:] != -100).sum()
    if _ignores_items(trainer, loss / copies, outputs, labels, predicted, items):
        loss = loss * (predicted / items)
        act()
    return (loss, outputs) if call["return_outputs"] else loss


def _ignores_items(trainer: Any, loss: Any, outputs: Any, labels: Any, predicted: Any, items: Any) -> bool:
    """Return whether ``loss`` is the mean over the predicted tokens. Without logits the answer is no."""
    if trainer in _ignoring:
        return _ignoring[trainer]
    logits = outputs.get("logits") if isinstance(outputs, dict) else None
    # An auxiliary loss is part of the loss, and sft-moe-aux-loss-times-gas weighs it.
    if logits is None or outputs.get("aux_loss") is not None:
        return False
    if logits.shape[:-1] != labels.shape or loss.numel() != 1:
        return False
    total = _cross_entropy(logits.detach(), labels)
    mean, share = total / float(predicted), total / float(items)
    ignores = abs(float(loss) - mean) < abs(float(loss) - share)
    if share < _CLEARLY * mean:
        _ignoring[trainer] = ignores
    return ignores


def _cross_entropy(logits: Any, labels: Any) -> float:
    """Return the sum over the predicted tokens, row by row: logits in float32 are large."""
    from torch.nn.functional import cross_entropy

    pairs = zip(logits, labels, strict=True)
    return sum(float(cross_entropy(row[:-1].float(), ids[1:], reduction="sum")) for row, ids in pairs)


def each_micro_batch_has_its_share(module: ModuleType) -> Outcome:
    """Differentiate the loss of a model that ignores that its three tokens are of twelve."""
    import transformers
    from packaging.version import Version

    if not Version("4.48") <= Version(transformers.__version__) < Version("5.3"):
        return absent("this is a bug of every model, or of none that was run")
    if module_of(module.SFTTrainer.compute_loss) is not module:
        return absent("SFT of this release has the compute_loss of transformers")
    step = SftMoeStep(module, 0.0, aux_loss_enabled=False, current_gradient_accumulation_steps=4)
    forward = step.model.forward

    def without_aux_loss(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        del outputs["aux_loss"]
        return outputs

    step.model.forward = without_aux_loss
    gradient, _ = step.weights(items=12)
    return judge(gradient, right=0.25, wrong=1.0)
