from dataclasses import dataclass

from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ModelArguments:
    model_name: str = "gpt2"


parser = HfArgumentParser((ModelArguments, SFTConfig))
model_args, training_args = parser.parse_args_into_dataclasses()
SFTTrainer(model_args.model_name, args=training_args).train()
