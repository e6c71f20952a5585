"""Patches of what TRL does to data sets and templates, for any trainer."""
