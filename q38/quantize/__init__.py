"""Packing, rounding, the AutoRound driver and the INT8 re-pack."""
