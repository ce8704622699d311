"""A family under other names: its modelling file copied with classes, modules, weights and model_type renamed."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import families

KEPT = {
    "weight", "bias",  # parameters of torch's own classes
    "model", "transformer", "gpt_neox",  # base_model_prefix, which transformers itself looks up
    "dropout", "inv_freq", "original_inv_freq",  # words that functions and transformers' rope helpers also use
    "experts", "gate_up_proj", "gate_up_proj_bias", "down_proj_bias", "act_fn",  # the experts interface
}
"""Names that aren't the authors' own to choose."""


def write(folder: Path, family: str, seed: int = 0) -> tuple[Path, Path]:
    """(the family's own directory, the same model as a directory that brings its code under other names)."""
    row = families.FAMILIES[family]
    plain = families.write(folder / "plain", family, seed)
    return plain, _rename(plain, folder / "other", row.model_type)


def _rename(plain: Path, other: Path, model_type: str) -> Path:
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(plain)
    module = AutoModelForCausalLM.from_pretrained(plain)
    modelling = sys.modules[type(module).__module__]
    configuration = sys.modules[type(config).__module__]
    words = _words(module, model_type, inspect.getsource(modelling))
    classes = {name: f"Renamed{number}" + ("RMSNorm" if name.endswith("RMSNorm") else "") for number, name in
               enumerate(n for n, c in vars(modelling).items() if inspect.isclass(c) and c.__module__ == modelling.__name__)}
    classes |= {type(config).__name__: "RenamedConfig"}
    texts = {"modeling_renamed.py": inspect.getsource(modelling),
             "configuration_renamed.py": inspect.getsource(configuration)}
    other.mkdir()
    for file, text in texts.items():
        for old, new in {**classes, **words}.items():
            text = re.sub(rf"\b{old}\b", new, text)
        text = text.replace(f'model_type = "{model_type}"', 'model_type = "renamed"')
        package = modelling.__name__.rpartition(".")[0]
        text = re.sub(r"from \.configuration_\w+ import", "from .configuration_renamed import", text)
        text = re.sub(r"^from (\.+)(\w[\w.]*)? ?import", lambda m: _absolute(package, m), text, flags=re.MULTILINE)
        text = _undocumented(text)
        (other / file).write_text(text)
    stated = json.loads((plain / "config.json").read_text())
    heads = {"AutoConfig": "configuration_renamed.RenamedConfig",
             "AutoModelForCausalLM": f"modeling_renamed.{classes[type(module).__name__]}"}
    stated |= {"model_type": "renamed", "auto_map": heads, "architectures": [classes[type(module).__name__]]}
    (other / "config.json").write_text(json.dumps(stated))
    kept = {*dict(module.named_parameters()), *dict(module.named_buffers())}  # a tied one under one of its names
    save_file({".".join(words.get(part, part) for part in name.split(".")): value.contiguous().clone()
               for name, value in module.state_dict().items() if name in kept},
              other / "model.safetensors", {"format": "pt"})
    return other


def _undocumented(text: str) -> str:
    """Without the decorator that writes docstrings from transformers' own table of models."""
    plain = "def _plain(*a, **k):\n    return a[0] if a and callable(a[0]) else lambda f: f\n\n\n"
    start = re.search(r"^(@|class |def )", text, flags=re.MULTILINE).start()
    return text[:start] + plain + re.sub(r"@auto_docstring\b", "@_plain", text[start:])


def _absolute(package: str, match: re.Match) -> str:
    dots, rest = match[1], match[2] or ""
    if rest.startswith("configuration_renamed"):
        return match[0]
    base = package.split(".")[: len(package.split(".")) - (len(dots) - 1)]
    return f"from {'.'.join([*base, *([rest] if rest else [])])} import"


def _words(module, model_type: str, source: str) -> dict[str, str]:
    """Names of submodules, parameters and buffers that the file itself gives, each with another one."""
    leaves = {part for name, _ in [*module.named_modules(), *module.named_parameters()] for part in name.split(".")}
    kept = KEPT | ({"down_proj"} if "experts" in leaves else set())
    own = sorted(leaf for leaf in leaves if leaf and not leaf.isdigit() and leaf not in kept
                 and re.search(rf"self\.{leaf} = ", source))
    return {name: f"part_{i}" for i, name in enumerate(own)}
