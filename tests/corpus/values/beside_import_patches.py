"""The import of a file changes what the config has by default."""
import shared_patches  # noqa: F401
from trl import SFTConfig, SFTTrainer

SFTTrainer("gpt2", args=SFTConfig("out")).train()
