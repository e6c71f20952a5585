from recipes.pairs import make_trainer

trainer = make_trainer("gpt2")
trainer.train()
