"""Patches of PEFT adapters in any trainer."""
