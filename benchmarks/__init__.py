"""What trl_hotfix costs and gains: ``python -m benchmarks.run``."""
