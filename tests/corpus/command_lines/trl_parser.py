from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
trainer = SFTTrainer(
    model=model_args.model_name_or_path,
    args=training_args,
    peft_config=get_peft_config(model_args),
)
trainer.train()
