"""The model runtime of both pools: weights, forward pass, attention back ends, sampler."""
