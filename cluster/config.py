"""Configuration of a whole cluster: defaults, then a YAML file, then flags.

The sections `router`, `prefill_worker`, `decode_worker` and `transfer` are the configuration
classes of those packages themselves, so that an option exists once. An option's path in the file,
`router.max_active_requests`, gives its flag, `--router-max-active-requests`.
"""

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.errors import ConfigError
from decode_worker.config import DecodeConfig
from kv_transfer.deadlines import TransferDeadlines
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig

# Set by the composition root alone, so neither in files nor flags.
INTERNAL_PATHS = {
    "decode_worker.hash_key",
    "decode_worker.transfer_deadlines",
    "prefill_worker.hash_key",
    "prefill_worker.transfer_deadlines",
    "router.cache_salt",
    "router.page_hash_key",
    "router.router_id",
}


class ClusterConfig(BaseModel):
    """All options. Times are seconds; a description says what a value means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path | None = Field(
        None, description="Checkpoint folder: config.json, safetensors, tokenizer.json."
    )
    served_model_name: str = Field("", description="Name of the model; default: the folder's.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the workers compute; auto: CUDA if there is a GPU."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Of weights and pages; auto: the checkpoint's on CUDA, float32 on CPU.",
    )
    deterministic: bool = Field(
        True, description="Same bits in any batch on GPUs; false: cuBLAS, which may be faster."
    )
    prefill: int = Field(1, ge=1, le=1024, description="Number of prefill workers.")
    decode: int = Field(1, ge=1, le=1024, description="Number of decode workers.")

    host: str = Field("127.0.0.1", min_length=1, description="Address the router listens on.")
    port: int = Field(50051, ge=0, le=65535, description="Port of the router; 0: a free one.")

    page_size: Literal[16, 32, 64, 128] = Field(64, description="Token slots in a page.")
    num_pages: int = Field(
        0, ge=0, description="Pages of each worker; 0: as many as its memory allows."
    )
    gpu_memory_fraction: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Share for pages of the GPU memory that is free after the weights.",
    )
    cpu_pages_mib: int = Field(
        256, ge=1, description="Memory for pages of each worker without a GPU, MiB."
    )
    cpu_threads: int = Field(1, ge=1, description="Threads of each worker without a GPU.")

    ray_address: str = Field(
        "", description="Ray cluster to attach to, host:port or auto; empty: start a local one."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, description="Longest time until all workers are ready, weights included."
    )
    stop_grace_s: float = Field(
        10.0, ge=0, description="Time that running requests get when the cluster stops."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines to write."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people (key=value) or for machines (JSON)."
    )

    router: RouterConfig = Field(default_factory=RouterConfig)
    prefill_worker: PrefillConfig = Field(default_factory=PrefillConfig)
    decode_worker: DecodeConfig = Field(default_factory=DecodeConfig)
    transfer: TransferDeadlines = Field(default_factory=TransferDeadlines)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOption:
    """One leaf of the configuration."""

    path: str  # "router.max_active_requests"
    section: str  # "router"; empty for the top level
    value_type: Any  # as a command line parses it: int, float, str or bool
    default: Any
    description: str

    @property
    def flag(self) -> str:
        """Its spelling on the command line."""
        return "--" + self.path.replace(".", "-").replace("_", "-")


# Given what is set already, returns what a command sets otherwise, by option path.
Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def no_defaults(_: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return no defaults of a command's own."""
    return {}


def config_options() -> dict[str, ConfigOption]:
    """Return all options by path, in the order of their declaration."""
    return {option.path: option for option in _walk() if option.path not in INTERNAL_PATHS}


def load_config(
    path: Path | None, overrides: Mapping[str, Any], defaults: Defaults = no_defaults
) -> ClusterConfig:
    """Merge a YAML file and overrides (both by option path) over defaults, and check all.

    Args:
        path: The file; None: there is none.
        overrides: What the command line gave.
        defaults: A command's own, given what file and command line set.

    Raises:
        ConfigError: Names the file, the option's path, the value found and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}  # option path |-> where its value is from
    if path is not None:
        for name, value in _flatten(_read_yaml(path)):
            values[name], origin[name] = value, str(path)
    for name, value in overrides.items():
        values[name], origin[name] = value, "command line"
    options = config_options()
    for name in values:
        if name not in options:
            raise ConfigError(f"{origin[name]}: {_unknown(name, options)}")
    for name, value in defaults(values).items():
        values.setdefault(name, value)
        origin.setdefault(name, "default")
    try:
        return ClusterConfig.model_validate(_nest(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, values, origin) for e in error.errors())) from error


def _walk() -> Iterator[ConfigOption]:
    for name, info in ClusterConfig.model_fields.items():
        if is_dataclass(info.annotation):
            yield from _walk_section(name, info.annotation)
            continue
        yield ConfigOption(
            path=name,
            section="",
            value_type=_flag_type(info.annotation),
            default=info.default,
            description=_with_choices(info.description or "", info.annotation),
        )


def _walk_section(section: str, owner: Any) -> Iterator[ConfigOption]:
    hints = typing.get_type_hints(owner)
    comments = field_comments(owner)
    for field in fields(owner):
        has_default = field.default is not MISSING
        yield ConfigOption(
            path=f"{section}.{field.name}",
            section=section,
            value_type=_flag_type(hints[field.name]),
            default=field.default if has_default else None,
            description=comments.get(field.name, ""),
        )


def field_comments(owner: type) -> dict[str, str]:
    """Return what the comments beside a dataclass's fields say: their documentation."""
    comments: dict[str, str] = {}
    current = ""  # the field whose comment may go on in the next line
    for line in inspect.getsource(owner).splitlines():
        if found := re.match(r"    (\w+): ", line):
            current = found[1]
        elif not line.strip() or re.match(r"    (@|def )", line):
            current = ""
        _, sign, comment = line.partition("# ")
        if current and sign:
            comments[current] = f"{comments.get(current, '')} {comment.strip()}".strip()
    return {name: text[0].upper() + text[1:] for name, text in comments.items()}


def _with_choices(description: str, annotation: Any) -> str:
    if typing.get_origin(annotation) is not Literal:
        return description
    return f"{description} One of {', '.join(map(str, typing.get_args(annotation)))}."


def _flag_type(annotation: Any) -> Any:
    """Return the simple type in which a flag is parsed; pydantic checks the rest."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return type(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not types.NoneType)
    return annotation if annotation in (int, float, bool) else str


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds {type(content).__name__}, must be a mapping of options")
    return content


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _unknown(name: str, options: Mapping[str, ConfigOption]) -> str:
    sections = {option.section for option in options.values() if option.section}
    if name in sections:
        return f"{name} is a section; give a mapping of its options"
    leaves = {option.path.rpartition(".")[2]: option.path for option in options.values()}
    close = difflib.get_close_matches(name, options, n=1)
    close = close or [
        leaves[leaf] for leaf in difflib.get_close_matches(name.rpartition(".")[2], leaves, n=1)
    ]
    hint = f"did you mean {close[0]}?" if close else "see docs/configuration.md for all options"
    return f"unknown option {name}; {hint}"


def _explain(error: Any, values: Mapping[str, Any], origin: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if path in values:
        return f"{origin[path]}: {path} is {values[path]!r}; it {message}"
    # A rule of a whole section names the option itself.
    return f"{path}: {message}"
