from trl import KTOConfig, KTOTrainer

# trl-hotfix: ignore[kto-paired-data-in-blocks] our data has labels
KTOTrainer("gpt2", args=KTOConfig("out")).train()
