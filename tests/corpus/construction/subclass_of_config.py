from dataclasses import dataclass, field

from trl import DPOConfig, DPOTrainer


@dataclass
class ProjectConfig(DPOConfig):
    padding_free: bool = field(default=True)
    use_logits_to_keep: bool = field(default=True)
    project: str = "alpha"


DPOTrainer("gpt2", args=ProjectConfig(output_dir="out")).train()
