"""Machine probe, engines, launch and lifecycle, HTTP client."""
