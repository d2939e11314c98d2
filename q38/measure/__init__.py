"""Quality, oracle, bench, statistics."""
