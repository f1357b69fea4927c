"""autopar: see docs/architecture.md."""
