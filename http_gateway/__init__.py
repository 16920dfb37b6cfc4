"""OpenAI-compatible HTTP in front of a router's gRPC API: a separate process without a model."""
