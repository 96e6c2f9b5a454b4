"""YAML: one value, or the mapping of a config; a mistake is an error that names the place and the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from hybrid_rlhf.configs.errors import UserError

_MAX_YAML_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats too: YAML 1.1 takes 1e-3, without a point, for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """The mapping of a YAML text in which no key is repeated.

    Raises:
        UserError: naming `origin` and the line.
    """
    content = yaml_value(text, origin)
    if content is not None and not isinstance(content, dict):
        raise UserError(
            f"{origin}: a config is a mapping of keys, got a {type(content).__name__}: write KEY: VALUE lines"
        )
    return content or {}


def yaml_value(text: str, origin: str) -> Any:
    """The value of a YAML text in which no key is repeated.

    Raises:
        UserError: naming `origin` and the line.
    """
    try:
        _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), origin)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader  # nosec B506
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{origin}:{line}: not YAML ({error.problem}): fix the line") from error
    except yaml.YAMLError as error:  # a character that no text has
        raise UserError(f"{origin}: not YAML ({' '.join(str(error).split())}): fix it") from error
    except RecursionError as error:
        raise UserError(f"{origin}: not YAML that can be read (it is nested too deeply): fix it") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # what it raises for dates and explicit types
        reason = str(error).partition(";")[0]
        raise UserError(f"{origin}: not YAML that can be read ({reason}): put the value in quotes") from error


def _check_nodes(root: yaml.Node | None, origin: str) -> None:
    """Refuse repeated keys, of which YAML takes the last in silence, and anchors that unfold without an end."""
    for number, node in enumerate(_nodes(root, 0), start=1):
        if number > _MAX_YAML_NODES:
            raise UserError(
                f"{origin}: a config has at most {_MAX_YAML_NODES:,} values, got more: simplify its anchors"
            )
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{origin}:{line}: a key is a word, got a list or a mapping: fix the line")
            if key.value in seen:
                raise UserError(f"{origin}:{line}: a key is given once, {key.value} is repeated: keep one")
            seen.add(key.value)


def _nodes(node: yaml.Node | None, depth: int) -> Iterator[yaml.Node]:
    if node is None:
        return
    if depth > 50:
        raise RecursionError
    yield node
    values = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    for value in values if isinstance(node, yaml.CollectionNode) else ():
        yield from _nodes(value, depth + 1)
