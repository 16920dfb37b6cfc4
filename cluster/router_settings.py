"""Settings of a router, in Ray and outside it, from the options of its cluster."""

from dataclasses import replace

from cluster.config import ClusterConfig
from credentials.secret import RouterKeys
from llm_engine.model_files import text_folder
from router.settings import RouterSettings


def router_settings(
    config: ClusterConfig, router_id: str, keys: RouterKeys, *, shares_port: bool = False
) -> RouterSettings:
    """Return the settings of one router; raises as llm_engine.model_files.open_model.

    Args:
        config: The configuration of the cluster; it names a model.
        router_id: Its name in logs.
        keys: Prove its identity.
        shares_port: Other routers may listen on the same port.
    """
    assert config.model is not None
    return RouterSettings(
        config=replace(
            config.router,
            router_id=router_id,
            local_prefill_max_tokens=config.decode_worker.local_prefill_max_tokens,
            max_running_sequences=config.decode_worker.max_running_sequences,
        ),
        model_dir=text_folder(config.model),
        host=config.host,
        network_interface=config.network_interface,
        port=config.port,
        ports=config.free_ports,
        shares_port=shares_port,
        log_level=config.log_level,
        log_format=config.log_format,
        tls=config.tls_settings,
        tracing=config.tracing,
        keys=keys,
    )
