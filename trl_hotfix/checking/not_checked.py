"""What a check leaves out, in words."""

from __future__ import annotations

NOT_CHECKED = (
    *("dropout", "clipping of gradients", "the optimizer and its schedule", "precision"),
    *("DeepSpeed and FSDP", "vLLM", "Liger", "quantisation"),
)
