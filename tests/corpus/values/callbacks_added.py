from peft import LoraConfig
from trl import BEMACallback, SFTConfig, SFTTrainer

callbacks = []
if LoraConfig is not None:
    callbacks.append(BEMACallback(update_freq=100))
trainer = SFTTrainer("gpt2", args=SFTConfig("out"), peft_config=LoraConfig(), callbacks=callbacks)
trainer.train()

plain = SFTTrainer("gpt2", args=SFTConfig("out"), callbacks=[*callbacks])
plain.add_callback(BEMACallback)
plain.train()
