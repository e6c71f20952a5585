from trl import SFTConfig, SFTTrainer

PRESETS = {
    "small": {"packing": False, "max_length": 512},
    "large": {"packing": True, "max_length": 4096},
}
preset = PRESETS["large"]
SFTTrainer("gpt2", args=SFTConfig("out", **preset)).train()
SFTTrainer("gpt2", args=SFTConfig("out", packing=PRESETS["small"]["packing"])).train()
