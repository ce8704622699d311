"""Which keys of a configuration modelling code reads while a module is built and traced.

A key that nothing reads would be ignored silently: a new feature of a model, or a misspelt one. Reads are seen by
wrapping attribute access of configuration objects; values that are dicts are replaced by dicts that record their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from adaptc.errors import UnusedError
from adaptc.models import waivers
from adaptc.sources.waiver import Waiver, way_on

_MISSING = object()

PER_LAYER = "per_layer_config"
"""Where transformers' configurations have what single layers differ in: layer → keys, which are read of the layer's own
configuration, one of the same class."""


class ConfigReads:
    """The keys that were read, against those that were given. Nested keys are dotted: ``rope_parameters.factor``.
    ``place`` is what errors call the place where they were given, such as "m (config.json)"."""

    def __init__(self, given: Mapping[str, Any], config: Any, place: str, waiver: Waiver):
        self.given, self.place, self.waiver = given, place, waiver
        self._values = dict(leaves(given))
        self._type = given.get("model_type", "")
        self._always = waivers.ALWAYS.get(self._type, {})
        self.read: set[str] = set()
        self._declared = dict(type(config).attribute_map)
        self._layer_types = getattr(config, "layer_types", None)
        self._defaults = type(config)
        self._inner = inner_configs(config)

    def unread_keys(self) -> tuple[str, ...]:
        """Given keys that are neither read, under any of their names, nor waived (``adaptc.models.waivers``, or by the
        caller), nor say what the configuration class says by itself, or what a key that is accounted for says."""
        return tuple(key for key in self._values if not self._accounted(key) and not self.waiver.covers(key))

    def check(self) -> None:
        """UnusedError naming the keys that nothing has read."""
        unread = self.unread_keys()
        if unread:
            raise UnusedError(
                f"nothing in the model's code reads {', '.join(map(repr, unread))} of the configuration of "
                f"{self.place}.",
                hint="The key is misspelt, or asks for a feature that this version of transformers doesn't implement. "
                + way_on(unread),
            )

    def _accounted(self, key: str) -> bool:
        if self._listed(waivers.CONFIG, key):
            return True
        if self._default(key) or self._stated(key):
            return True
        own = key.split(".", 2)[2] if key.startswith(f"{PER_LAYER}.") and key.count(".") > 1 else key
        if any(self._canonical(name) in self.read or self._idle(name) for name in waivers.aliases(own)):
            return True
        return self._of_inner(key)

    def _of_inner(self, key: str) -> bool:
        """Whether the key is one of a configuration within this one, and accounted for there."""
        name, dot, rest = key.partition(".")
        if not dot or name not in self._inner or not isinstance(self.given.get(name), Mapping):
            return False
        inner = ConfigReads(self.given[name], self._inner[name], self.place, self.waiver)
        inner.read = {path.removeprefix(f"{name}.") for path in self.read if path.startswith(f"{name}.")}
        return inner._accounted(rest)

    def _default(self, key: str) -> bool:
        """Whether leaving the key out would make no difference: its value is the class's own default, or what the class
        makes of the other keys."""
        if key not in self.given:
            return False
        if getattr(self._defaults, key, _MISSING) == self.given[key]:
            return True
        try:
            without = self._defaults(**{other: value for other, value in self.given.items() if other != key})
            return getattr(without, key, _MISSING) == self.given[key]
        except Exception:  # whatever a class raises that can't do without the key, or has it for each layer alone
            return False

    def _stated(self, key: str) -> bool:
        """Whether the value is what the class always does, or what another key says that is accounted for."""
        value = self._values[key]
        if key in self._always:
            return self._always[key] == value
        return any(self._values.get(other, _MISSING) == value and self._accounted(other)
                   for other in waivers.REPEATED.get(key, ()))

    def _idle(self, key: str) -> bool:
        """Whether only layers of a type that the model doesn't have would read ``key``."""
        layer_type = self._listed(waivers.LAYER_KEYS, key)
        return bool(self._layer_types and layer_type and layer_type not in self._layer_types)

    def _listed(self, table: Mapping[str, str], key: str) -> str | None:
        """What a table says of a key of all models, or of this model_type's alone."""
        return waivers.reason(table, key) or waivers.reason(table, f"{self._type}:{key}")

    def _canonical(self, key: str) -> str:
        head, dot, rest = key.partition(".")
        return self._declared.get(head, head) + dot + rest


class _RecordedDict(dict):
    """A dict of a configuration that notes each key looked up in it; looking at all of them reads all of them."""

    def __init__(self, content: Mapping[str, Any], path: str, read: set[str]):
        super().__init__(content)
        self._path, self._read = path, read

    def _note(self, key: object, value: Any) -> Any:
        path = f"{self._path}.{key}"
        if isinstance(value, dict):
            return _RecordedDict(value, path, self._read)
        self._read.add(path)
        return value

    def __getitem__(self, key):
        return self._note(key, super().__getitem__(key))

    def get(self, key, default=None):
        return self[key] if key in self else default

    def items(self):
        return [(key, self[key]) for key in self]

    def values(self):
        return [self[key] for key in self]


@contextmanager
def recorded_reads(config: Any, given: Mapping[str, Any], place: str,
                   waiver: Waiver = Waiver()) -> Iterator[ConfigReads]:
    """Records reads of ``config`` and its copies (transformers copies configurations freely) within the block."""
    from transformers import PreTrainedConfig

    prefixes: dict[type, str] = {type(config): ""}
    for key, value in inner_configs(config).items():
        prefixes.setdefault(type(value), f"{key}.")
    reads = ConfigReads(given, config, place, waiver)
    original = PreTrainedConfig.__getattribute__

    def recording(self, key: str):
        value = original(self, key)
        prefix = prefixes.get(type(self))
        if prefix is None or key.startswith("__"):
            return value
        path = prefix + type(self).attribute_map.get(key, key)
        if isinstance(value, dict) and not key.startswith("_"):
            return _RecordedDict(value, path, reads.read)
        reads.read.add(path)
        return value

    PreTrainedConfig.__getattribute__ = recording
    try:
        yield reads
    finally:
        PreTrainedConfig.__getattribute__ = original


def inner_configs(config: Any) -> dict[str, Any]:
    """The configurations within a configuration, by their keys."""
    from transformers import PreTrainedConfig

    return {key: value for key, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of all values that aren't dicts themselves; a null says nothing, and empty dicts have no keys."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
