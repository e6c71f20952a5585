"""Patches of DPOTrainer."""
