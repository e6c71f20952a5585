"""The stubs of TRL are behind, so the class is cast."""
from typing import Any, cast

from trl import SFTConfig, SFTTrainer

trainer = cast(Any, SFTTrainer)("gpt2", args=SFTConfig(output_dir="out", packing=True))
trainer.train()
