from transformers import HfArgumentParser
from trl import DPOConfig, DPOTrainer

parser = HfArgumentParser(DPOConfig)
(args,) = parser.parse_dict({"output_dir": "out", "padding_free": True, "loss_type": "ipo"})
DPOTrainer("gpt2", args=args).train()
