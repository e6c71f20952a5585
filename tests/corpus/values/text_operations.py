from trl import SFTConfig, SFTTrainer

field = "body".replace("body", "text")
other = "_".join(["field"])
SFTTrainer("gpt2", args=SFTConfig("out", dataset_text_field=field)).train()
SFTTrainer("gpt2", args=SFTConfig("out", dataset_text_field=other + "s")).train()
SFTTrainer("gpt2", args=SFTConfig("out", dataset_text_field="na" "me")).train()
