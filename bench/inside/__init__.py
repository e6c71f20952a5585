"""What runs inside one release for a test of the same name in ``tests/bench``; ``trainers`` makes each trainer."""
