"""Seal, check, compare and describe a finished model."""
