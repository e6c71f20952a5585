import os

from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

here = os.path.dirname(__file__)
parser = HfArgumentParser(SFTConfig)
(args,) = parser.parse_yaml_file(os.path.join(here, "packed.yaml"))
SFTTrainer("gpt2", args=args).train()
