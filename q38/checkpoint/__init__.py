"""Safetensors on disk: headers, streaming reads, atomic resumable writes, manifests."""
