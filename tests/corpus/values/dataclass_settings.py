from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer


@dataclass
class Settings:
    model: str = "gpt2"
    packing: bool = True
    steps: int = 4


settings = Settings()
args = SFTConfig("out", packing=settings.packing, gradient_accumulation_steps=settings.steps)
SFTTrainer(settings.model, args=args).train()
