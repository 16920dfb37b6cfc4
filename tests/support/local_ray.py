"""Several Rays, one after another, in one process."""


def forget_token() -> None:
    """Make Ray read the next token: a process that has started a Ray remembers its token."""
    from ray._raylet import AuthenticationTokenLoader

    AuthenticationTokenLoader.instance().reset_cache()
