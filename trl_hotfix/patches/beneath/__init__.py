"""Patches of what a layer beneath TRL does to every trainer: transformers, DeepSpeed."""
