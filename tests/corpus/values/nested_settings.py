from dataclasses import dataclass, field

from trl import SFTConfig, SFTTrainer


@dataclass
class Job:
    model: str = "gpt2"
    training: SFTConfig = field(default_factory=lambda: SFTConfig("out", packing=True))


job = Job()
SFTTrainer(job.model, args=job.training).train()
