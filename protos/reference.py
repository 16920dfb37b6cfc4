"""Makes the page of the gRPC interface from the .proto files and their comments (make docs).

It parses the few forms that these files use: a comment above each service, method, message, field,
enum and value. A test compares the result with the descriptors.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# In the order in which a reader meets them.
FILES = ("inference.proto", "common.proto", "worker.proto", "controller.proto")
INTRODUCTION = """\
# gRPC

Generated from the comments of the files in [protos/](../../protos) when this site is built. The
router serves `pagewire.v1.InferenceService` to clients. The other services are calls within a
cluster, which need a proof of their caller ([Security](../security.md)); [Protocol](../protocol.md)
explains how they interact. Routers and workers also offer the standard health service, and routers
reflection.

```sh
grpcurl -plaintext -d '{"text": "The page was", "sampling": {"max_tokens": 4}}' \\
    localhost:50051 pagewire.v1.InferenceService/Generate
```
"""
OPENING = re.compile(r"(service|message|enum|oneof|extend) ([\w.]+) \{(\})?")
METHOD = re.compile(r"rpc (\w+)\((stream )?([\w.]+)\) returns \((stream )?([\w.]+)\)")
FIELD = re.compile(r"(optional |repeated )?([\w.]+) (\w+) = (\d+)")
LIMIT = re.compile(r"\(most\) = (\d+)")
VALUE = re.compile(r"(\w+) = (\d+)")


@dataclass(kw_only=True, slots=True)
class Member:
    """A method, field or value."""

    name: str
    form: str  # its types or its number
    comment: str
    callers: str = ""  # of a method, as the contract names them
    choice: str = ""  # the oneof of a field


@dataclass(kw_only=True, slots=True)
class Block:
    """A service, message or enum."""

    kind: str
    name: str
    comment: str
    members: list[Member] = field(default_factory=list)


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the declarations of a .proto file in order, except extensions.

    Raises:
        ValueError: If a line has an unknown form.
    """
    block: Block | None = None
    comments: list[str] = []
    choice, in_method, in_extension = "", False, False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comments.append(line.removeprefix("//").strip())
            continue
        comment, comments = " ".join(comments), []
        if not line or line.startswith(("syntax", "package", "import", "reserved")):
            continue
        if in_extension:
            in_extension = line != "}"
        elif in_method:
            if block and (named := re.fullmatch(r"option \(callers\) = CALLER_(\w+);", line)):
                last = block.members[-1]
                last.callers = ", ".join(filter(None, (last.callers, named[1].lower())))
            in_method = line != "}"
        elif line == "}":
            if choice:
                choice = ""
            elif block is not None:
                yield block
                block = None
        elif opening := OPENING.fullmatch(line):
            kind, name, is_empty = opening.groups()
            if kind == "oneof":
                choice = name
            elif kind == "extend":
                in_extension = True
            else:
                block = Block(kind=kind, name=name, comment=comment)
                if is_empty:
                    yield block
                    block = None
        elif block is None:
            raise ValueError(f"unknown form outside of a block: {line}")
        else:
            member = _member(block.kind, line, comment, choice)
            block.members.append(member)
            in_method = block.kind == "service" and line.endswith("{")


def _member(kind: str, line: str, comment: str, choice: str) -> Member:
    if kind == "service" and (method := METHOD.match(line)):
        name, stream_in, request, stream_out, answer = method.groups()
        form = f"{stream_in or ''}{_linked(request)} → {stream_out or ''}{_linked(answer)}"
        return Member(name=name, form=form, comment=comment)
    if kind == "enum" and (value := VALUE.match(line)):
        return Member(name=value[1], form=value[2], comment=comment)
    if kind == "message" and (found := FIELD.match(line)):
        label, type_, name, _ = found.groups()
        form = f"{label or ''}{_linked(type_)}"
        if limit := LIMIT.search(line):
            form += f", at most {int(limit[1]):,} between processes of a cluster"
        return Member(name=name, form=form, comment=comment, choice=choice)
    raise ValueError(f"unknown form in a {kind}: {line}")


def _linked(type_: str) -> str:
    return f"[{type_}](#{type_.lower()})" if type_[0].isupper() else type_


def reference_page() -> str:
    """Return the page as Markdown."""
    blocks = [
        block
        for name in FILES
        for block in read_blocks((FOLDER / name).read_text(encoding="utf-8"))
    ]
    parts = [INTRODUCTION]
    for kind, title in (("service", "Services"), ("message", "Messages"), ("enum", "Enumerations")):
        parts.append(f"\n## {title}\n")
        parts += [_section(block) for block in blocks if block.kind == kind]
    return "".join(parts)


def _section(block: Block) -> str:
    text = f"\n### {block.name}\n\n{_escaped(block.comment)}\n"
    if not block.members:
        return text
    if block.kind == "service":
        rows = [
            f"| `{each.name}` | {each.form} | {each.callers} | {_escaped(each.comment)} |\n"
            for each in block.members
        ]
        head = "\n| method | request → answer | callers | |\n|---|---|---|---|\n"
    else:
        rows = [
            f"| `{each.name}` | {each.form} | {_choice(each)}{_escaped(each.comment)} |\n"
            for each in block.members
        ]
        head = f"\n| {'value' if block.kind == 'enum' else 'field'} | | |\n|---|---|---|\n"
    return text + head + "".join(rows)


def _choice(member: Member) -> str:
    return f"(one of `{member.choice}`) " if member.choice else ""


def _escaped(comment: str) -> str:
    """Return a comment with escapes for the cell of a table."""
    return re.sub(r"([|<>*\[\]])", r"\\\1", comment)
