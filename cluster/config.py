"""Configuration of a whole cluster: defaults, then a YAML file, then flags.

The sections `router`, `prefill_worker`, `decode_worker` and `transfer` are the configuration
classes of those packages themselves, so that an option exists once. An option's path in the file,
`router.max_active_requests`, gives its flag, `--router-max-active-requests`.
"""

import difflib
import inspect
import ipaddress
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

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

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if re.search(r"[\s/]", host) or (":" in host and not _is_ipv6(host)):
            raise ValueError("must be a host name or an address, without a port; see port")
        return host

    @field_validator("ray_address")
    @classmethod
    def _check_ray_address(cls, address: str) -> str:
        found = re.fullmatch(r"[^\s:/]+:(\d+)|\[[0-9a-fA-F:]+\]:(\d+)", address)
        if address in ("", "auto") or (found and 0 < int(found[1] or found[2]) <= 65535):
            return address
        raise ValueError("must be host:port of a Ray cluster, as in 10.0.0.1:6379, or auto")


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
        ConfigError: Has a line for each wrong option: the file, the option's path, the value found
            and what is allowed.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}  # option path |-> where its value is from
    if path is not None:
        for name, value in _flatten(_read_yaml(path)):
            if name in values:
                raise ConfigError(f"{path}: {name} is given twice")
            values[name], origin[name] = value, str(path)
    for name, value in overrides.items():
        values[name], origin[name] = value, "command line"
    options = config_options()
    wrong = []
    for name in [name for name in values if name not in options]:
        del values[name]
        wrong.append(f"{origin[name]}: {_unknown(name, options)}")
    for name in [name for name in values if isinstance(values[name], bool)]:
        if options[name].value_type is not bool:
            # Python, and with it pydantic, would take it for 0 or 1.
            kind = options[name].value_type.__name__
            wrong.append(f"{origin[name]}: {name} is {values.pop(name)}; it must be of type {kind}")
    for name, value in defaults(values).items():
        values.setdefault(name, value)
        origin.setdefault(name, "default")
    while True:
        try:
            config = ClusterConfig.model_validate(_nest(values))
            break
        except ValidationError as error:
            # A section's rules are looked at only when the types of its options are right, so the
            # rest is checked again without what was wrong.
            for problem in _explain(error, values):
                wrong.append(f"{origin[problem.paths[0]]}: {problem.message}")
                for name in problem.paths:
                    values.pop(name, None)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return config


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
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506 - safe
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except _DuplicateKey as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: holds {type(content).__name__}, must be a mapping of options")
    return content


class _DuplicateKey(yaml.YAMLError):
    """A mapping has a key twice; says which, and where."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice; YAML's own loaders keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}  # key |-> line of its first use
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise _DuplicateKey(f"{name} is given twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    paths: list[str]  # of the options to blame, which somebody has set; at least one
    message: str


def _explain(error: ValidationError, values: Mapping[str, Any]) -> Iterator[_Problem]:
    for each in error.errors():
        path = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if path in values:
            yield _Problem(paths=[path], message=f"{path} is {values[path]!r}; it {message}")
            continue
        # A rule of a section: a line for each option, which begins with its name.
        for line in message.splitlines():
            named = [f"{path}.{word}" for word in re.findall(r"\w+", line)]
            blamed = [name for name in named if name in values]
            yield _Problem(paths=blamed, message=f"{path}.{line}")


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
