"""Patches of SFTTrainer, and what it does with its data."""
