from trl import SFTConfig, SFTTrainer

template = "### {instruction}"


def render(row):
    return template.format(**row)


use_template = True
trainer = SFTTrainer("gpt2", args=SFTConfig("out"), formatting_func=render if use_template else None)
trainer.train()
SFTTrainer("gpt2", args=SFTConfig("out", dataset_text_field="body"), formatting_func=lambda row: row["body"]).train()
