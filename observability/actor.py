"""What an actor of Ray knows of itself."""

import warnings

import ray


def has_come_back() -> bool:
    """Return whether this is not the actor's first process."""
    # Ray's property uses a deprecated one of its own, and warns every user of a cluster of it.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
