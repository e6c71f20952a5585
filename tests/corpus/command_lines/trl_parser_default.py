from dataclasses import dataclass

from trl import DPOConfig, DPOTrainer, TrlParser


@dataclass
class Ours(DPOConfig):
    padding_free: bool = True


(args,) = TrlParser((Ours,)).parse_args_and_config()
DPOTrainer("gpt2", args=args).train()
