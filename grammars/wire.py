"""Converts constraints between the contract of protos/ and this package's values."""

from grammars.constraint import Constraint, ConstraintKind
from grammars.errors import InvalidConstraint
from pagewire.protos import common_pb2


def constraint_from_proto(params: common_pb2.SamplingParams) -> Constraint | None:
    """Read the constraint of an answer; None: there is none.

    Raises:
        InvalidConstraint: The constraint is empty.
    """
    if not params.HasField("constraint"):
        return None
    message = params.constraint
    name = message.WhichOneof("kind")
    if name is None or (name == "json_object" and not message.json_object):
        allowed = "one of " + ", ".join(each.value for each in ConstraintKind)
        raise InvalidConstraint("nothing", allowed)
    kind = ConstraintKind(name)
    if kind is ConstraintKind.JSON_OBJECT:
        return Constraint(kind=kind)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind=kind, choices=tuple(message.choice.texts))
    return Constraint(kind=kind, text=getattr(message, name))


def constraint_to_proto(constraint: Constraint | None) -> common_pb2.Constraint | None:
    """Write the constraint of an answer."""
    if constraint is None:
        return None
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return common_pb2.Constraint(json_object=True)
        case ConstraintKind.CHOICE:
            return common_pb2.Constraint(choice=common_pb2.Choices(texts=constraint.choices))
        case kind:
            message = common_pb2.Constraint()
            setattr(message, kind.value, constraint.text)
            return message
