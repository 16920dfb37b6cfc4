"""Several Rays, one after another, in one process."""


def forget_token() -> None:
    """Have Ray read the token of the next one: a process that has started one remembers that."""
    from ray._raylet import AuthenticationTokenLoader

    AuthenticationTokenLoader.instance().reset_cache()
