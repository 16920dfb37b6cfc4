"""Settings of a router process, apart from it: whoever places a router imports no more."""

from dataclasses import dataclass, field
from pathlib import Path

from credentials.config import TlsSettings
from credentials.secret import RouterKeys
from observability.tracing import TracingConfig
from options.kept_by_name import kept_by_name
from options.ports import ANY_PORT, FreePorts
from router.config import RouterConfig


@kept_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Settings of a router process."""

    config: RouterConfig  # without keys
    model_dir: Path  # of tokenizer and chat template
    host: str  # where clients connect; empty: the address of network_interface
    port: int  # 0: one of `ports` at each start
    ports: FreePorts = ANY_PORT
    network_interface: str = ""
    shares_port: bool = False  # see router.front
    log_level: str = "info"  # see observability.logs
    log_format: str = "text"
    tls: TlsSettings = field(default_factory=TlsSettings)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    keys: RouterKeys = field(repr=False)
