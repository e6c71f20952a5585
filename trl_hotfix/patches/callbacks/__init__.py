"""Patches of TRL's callbacks."""
