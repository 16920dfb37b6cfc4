"""A command whose errors describe its parameters as the configuration defines them."""

from pagewire.cli.early_interrupts import interrupts_end_at_once
from pagewire.cli.strict_command import StrictCommand

# The option that gives a flag its default, and its bounds.
DEFAULTS = {"grace_s": "stop_grace_s"}


class ConfiguredCommand(StrictCommand):
    """Says what is allowed for options of the configuration, too."""

    def explain(self, name: str, found: str) -> str:
        """Return what was found and what is allowed for a value of a wrong type or range.

        Args:
            name: The name of the parameter: `port`, `router__dead_after_s`.
            found: As typed on the command line.
        """
        with interrupts_end_at_once():
            from cluster.config_options import config_options  # slow, and only errors need it

        if option := config_options().get(DEFAULTS.get(name, name.replace("__", "."))):
            return f"found {found!r}; allowed: {option.allowed()}"
        return super().explain(name, found)
