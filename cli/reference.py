"""Writes docs/configuration.md from the configuration itself (make docs)."""

from pathlib import Path

from cluster.config_options import ConfigOption, config_options, pool_options
from cluster.environment import FORWARDED_PREFIXES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

Written by `make docs`; a test compares it with the code.

Set options in a YAML file (`pagewire serve --config cluster.yaml`) or, except those of `pools`, as
flags of `serve`, `up` and `demo`: `router.max_active_requests` is `--router-max-active-requests`.
Flags override the file, and the file overrides the defaults. Some defaults differ in `demo` and on
CPUs: `--help` shows those of the command. Unknown options, repeated options and invalid values end
the command with exit code 2. One line for each names the file or the flag, the option and, for a
value, what was found and what is allowed. Commands for a running cluster, such as `down` and
`scale`, use only `ray_address`; `router-keys` also uses `secret_file`. Of the other options they
check only the names.

```yaml
model: /models/llama-3-8b
prefill: 1
decode: 3
device: cuda
page_size: 64
router:
  max_active_requests: 512
```

Names end in their units: `_s` seconds, `_mib` mebibytes, `_tokens` tokens, `_pages` pages.
"""
SECTIONS = {
    "": "Cluster",
    "tls": "TLS within the cluster: `tls`",
    "front_tls": "TLS with clients: `front_tls`",
    "tracing": "Traces: `tracing`",
    "http_gateway": "HTTP gateway: `http_gateway`",
    "router": "Router: `router`",
    "prefill_worker": "Prefill workers: `prefill_worker`",
    "decode_worker": "Decode workers: `decode_worker`",
    "transfer": "Page transfer, both sides: `transfer`",
}
POOLS = """
## Pools: `pools`

A pool is a set of workers with the same role and options. The pools prefill and decode always
exist; this section, which only files can have, sets their needs and adds pools of either role.
`pagewire scale --pool small=4` changes the number of a pool's workers while the cluster serves.
With `prefill: 0` the pool prefill has no workers, and may have no options.

```yaml
prefill: 2
decode: 4
ray_address: auto
pools:
  decode:
    accelerator_type: H100
  small:
    role: decode
    workers: 6
    accelerator_type: L4
    num_pages: 2048
```

| option | default | meaning |
|---|---|---|
"""
ENVIRONMENT = {  # variables that Pagewire itself reads
    "CUDA_VISIBLE_DEVICES": "GPUs of this host that workers may use; unset: all",
    "PAGEWIRE_KERNEL_CHECKS": "`1`: before each launch, check page ids, positions, scales and "
    "other values that only the device knows, which waits for the device; not in CUDA graphs",
    "PAGEWIRE_CACHE_DIR": "Folder for files that Pagewire can create again: configuration and "
    "tokenizer of GGUF files, the demo's random model; unset or empty: `pagewire` in "
    "`XDG_CACHE_HOME`",
    "PAGEWIRE_TOKEN": "For clients, including `generate`, `chat` and `status`: their tenant's "
    "token, unless another one is given",
    "RAY_ADDRESS": "Ray's own variable: the address that `ray_address: auto` means; unset: the "
    "newest Ray that runs on this host",
    "RAY_AUTH_MODE": "Ray's own variable; with `ray_address` it must be `token` if that Ray "
    "requires a token. Where `serve`, `up` and `demo` start a Ray they set it themselves; `doctor` "
    "checks it",
    "RAY_TMPDIR": "Folder in which `serve`, `up` and `demo` create `pagewire-UID`, which only "
    "their user can enter, for sockets, logs (`ray/session_latest/logs`) and token of the Ray that "
    "they start. An absolute path in ASCII, and short, since a socket's path has at most 107 "
    "bytes; unset: `/tmp`",
    "XDG_CACHE_HOME": "Folder of the user's caches; unset or empty: `~/.cache`",
}


def configuration_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for section, title in SECTIONS.items():
        options = [each for each in config_options().values() if each.section == section]
        parts += [f"\n## {title}\n\n| option | default | meaning |\n|---|---|---|\n"]
        parts += [_row(option) for option in options]
    parts += [POOLS, *map(_row, pool_options("NAME").values())]
    return "".join(parts) + _environment()


def _row(option: ConfigOption) -> str:
    default = "" if option.default in (None, "") else f"`{option.default}`"
    return f"| `{option.path}` | {default} | {option.description} |\n"


def _environment() -> str:
    prefixes = ", ".join(f"`{prefix}`" for prefix in FORWARDED_PREFIXES)
    rows = [f"| `{name}` | {meaning} |\n" for name, meaning in ENVIRONMENT.items()]
    return (
        "\n## Environment\n\n"
        "Variables that Pagewire itself reads. Workers, router and gateway also get the launching\n"
        f"process's variables whose names begin with {prefixes}, except a token.\n\n"
        "| variable | meaning |\n|---|---|\n"
    ) + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(configuration_page(), encoding="utf-8")
