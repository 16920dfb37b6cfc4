"""The model runtime that both pools share: weights, forward pass, attention back ends, sampler."""
