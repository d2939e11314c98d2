"""What Qwen4-Exp is: shape, tensor names and groups, n-gram geometry, synthetic models."""
