"""Patches of the fused language-model head."""
