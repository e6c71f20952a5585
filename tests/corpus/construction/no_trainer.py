"""Only prepares the data: nothing is trained here."""
from datasets import load_dataset
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("gpt2")
dataset = load_dataset("trl-lib/Capybara", split="train")
dataset.map(lambda row: tokenizer(row["text"]))
