"""OpenAI-compatible HTTP in front of a router's gRPC API: a process of its own, without a model."""
