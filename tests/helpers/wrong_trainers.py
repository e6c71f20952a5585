"""Subclasses of TRL's trainers with a mistake each, as people make them. The relations find them."""

from __future__ import annotations

from typing import Any

import trl


class DividesByMicroBatch(trl.SFTTrainer):  # type: ignore[misc]
    """Its loss is a mean over the micro-batch. transformers expects one over the step, and divides no more."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        kwargs.pop("num_items_in_batch", None)
        return super().compute_loss(model, inputs, *args, **kwargs) * 1.0


class DividesByWidth(trl.DPOTrainer):  # type: ignore[misc]
    """It divides its loss by the length of the longest row, padding included."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        width = max(value.shape[1] for name, value in inputs.items() if name.endswith("input_ids"))
        return super().compute_loss(model, inputs, *args, **kwargs) / width


if hasattr(trl, "GRPOTrainer"):

    class CentresAdvantagesAgain(trl.GRPOTrainer):  # type: ignore[misc]
        """It takes the mean of a micro-batch from the advantages, which the group's mean was taken from already."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(inputs, dict) and "advantages" in inputs:
                inputs = {**inputs, "advantages": inputs["advantages"] - inputs["advantages"].mean() + 0.1}
            return super().compute_loss(model, inputs, *args, **kwargs)
