"""Patches of GRPOTrainer and RLOOTrainer."""
