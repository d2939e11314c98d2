"""Synthetic checkpoints in the real release layouts."""
