"""Repairs of TRL for the jobs of Acme: a pack of trl_hotfix."""
