"""YAML that is read or refused in one line: `read_yaml`."""

from typing import Any

import yaml


class NotYamlError(ValueError):
    """A text that is not YAML, and why, in one line."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key that stands twice, of which YAML would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if str(key) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """What a YAML document says; NotYamlError also where a key stands twice.

    PyYAML has errors of its own, and others of 2026-13-01 and of brackets in brackets without end.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except RecursionError as error:
        raise NotYamlError("nested too deep") from error
    except (ValueError, yaml.YAMLError) as error:
        raise NotYamlError(" ".join(str(error).split())) from error
