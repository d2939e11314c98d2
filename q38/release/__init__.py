"""Seal, check and describe a finished model."""
